"""etcd: its keys as a table, and how the agents of a run elect their coordinator."""

from __future__ import annotations

from .client import CALL_TIMEOUT_S as CALL_TIMEOUT_S
from .client import EtcdClient as EtcdClient
from .kept_lease import KeptLease as KeptLease
from .keys import root_of as root_of
from .keys import store_id as store_id
from .leadership import Leadership as Leadership
from .leadership import NotLeaderError as NotLeaderError
from .leadership import await_no_leader as await_no_leader
from .leadership import campaign_for as campaign_for
from .table import EtcdTable as EtcdTable
