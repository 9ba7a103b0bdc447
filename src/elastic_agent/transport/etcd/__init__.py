"""etcd: its keys as a table, and how the agents of a run elect their coordinator."""

from __future__ import annotations

from .client import CALL_TIMEOUT_S, EtcdClient, Revisions
from .kept_lease import KeptLease
from .keys import root_of, store_id
from .leadership import Leadership, NotLeaderError, await_no_leader, campaign_for
from .table import EtcdTable

__all__ = [
    "CALL_TIMEOUT_S",
    "EtcdClient",
    "EtcdTable",
    "KeptLease",
    "Leadership",
    "NotLeaderError",
    "Revisions",
    "await_no_leader",
    "campaign_for",
    "root_of",
    "store_id",
]
