"""etcd: the links of the nodes and of the coordinator to one run."""

from __future__ import annotations

from .client import CALL_TIMEOUT_S, EtcdClient, Revisions
from .exchange import EtcdExchangeLink, dial_exchange
from .keys import RunKeys, run_life, store_id
from .leadership import Leadership, NotLeaderError, await_no_leader, campaign_for
from .link import EtcdLink, KeptLeases
from .plans import UnknownPlanError
from .report_link import EtcdReportLink

__all__ = [
    "CALL_TIMEOUT_S",
    "EtcdClient",
    "EtcdExchangeLink",
    "EtcdLink",
    "EtcdReportLink",
    "KeptLeases",
    "Leadership",
    "NotLeaderError",
    "Revisions",
    "RunKeys",
    "UnknownPlanError",
    "await_no_leader",
    "campaign_for",
    "dial_exchange",
    "run_life",
    "store_id",
]
