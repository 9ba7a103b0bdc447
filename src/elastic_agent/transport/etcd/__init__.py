"""etcd: its keys as a table, and how the agents of a run elect their coordinator."""

from __future__ import annotations

from .client import CALL_TIMEOUT_S as CALL_TIMEOUT_S
from .client import EtcdClient as EtcdClient
from .client import root_of as root_of
from .client import store_id as store_id
from .leadership import Leadership as Leadership
from .leadership import NotLeaderError as NotLeaderError
from .leadership import await_no_leader as await_no_leader
from .leadership import campaign_for as campaign_for
from .table import EtcdTable as EtcdTable
from .table import KeptLease as KeptLease
