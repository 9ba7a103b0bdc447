"""Access to a store: the records of a run, and the two kinds of stores below them.

The only code that accesses a store. Each store is a package of its own (:mod:`.c10d`, :mod:`.etcd`), which is not
imported from here: each loads a large library.
"""

from __future__ import annotations

from .addresses import (
    connect,
    interface_of,
    is_local,
    is_loopback_name,
    own_addresses,
    own_network_problem,
    resolve,
)
from .base import (
    NotAStoreError,
    Obstacle,
    OtherVersionError,
    RunView,
    Snapshot,
    StoreLostError,
    TransportError,
    UnreachableError,
    WrongKeyError,
)
from .blocking_call import run_abandonable
from .certificates import Pem, Secret
from .coordinator_records import CoordinatorRecords
from .keys import LifeKeys, RunKeys
from .peers import peer_uid
from .plans import UnknownPlanError
from .port_holder import holder_of
from .records import NodeRecords, begun_life_of, begun_runs, life_of
from .remedies import how_to_reach
from .report_records import ReportRecords
from .table import Table

__all__ = [
    "CoordinatorRecords",
    "LifeKeys",
    "NodeRecords",
    "NotAStoreError",
    "Obstacle",
    "OtherVersionError",
    "Pem",
    "ReportRecords",
    "RunKeys",
    "RunView",
    "Secret",
    "Snapshot",
    "StoreLostError",
    "Table",
    "TransportError",
    "UnknownPlanError",
    "UnreachableError",
    "WrongKeyError",
    "begun_life_of",
    "begun_runs",
    "connect",
    "holder_of",
    "how_to_reach",
    "interface_of",
    "is_local",
    "is_loopback_name",
    "life_of",
    "own_addresses",
    "own_network_problem",
    "peer_uid",
    "resolve",
    "run_abandonable",
]
