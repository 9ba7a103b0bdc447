"""Access to a store: the interfaces that every store implements, and what they share.

The only code that accesses a store. Each store is a package of its own (:mod:`.c10d`, :mod:`.etcd`), which is not
imported from here: each loads a large library.
"""

from __future__ import annotations

from . import tcpstore_wire
from .abandonable_thread import AbandonableThread
from .addresses import (
    connect,
    connect_in_loop,
    interface_of,
    is_local,
    is_loopback_name,
    own_addresses,
    own_network_problem,
    resolve,
    set_up_for_messages,
)
from .base import (
    CoordinatorLink,
    ExchangeLink,
    NodeLink,
    NotAStoreError,
    Obstacle,
    OtherVersionError,
    ReportLink,
    RunView,
    Snapshot,
    StoreLostError,
    TransportError,
    UnreachableError,
    WrongKeyError,
    not_a_store,
    silent,
)
from .certificates import Pem, Secret
from .peers import peer_uid
from .port_holder import holder_of
from .remedies import how_to_reach

__all__ = [
    "AbandonableThread",
    "CoordinatorLink",
    "ExchangeLink",
    "NodeLink",
    "NotAStoreError",
    "Obstacle",
    "OtherVersionError",
    "Pem",
    "ReportLink",
    "RunView",
    "Secret",
    "Snapshot",
    "StoreLostError",
    "TransportError",
    "UnreachableError",
    "WrongKeyError",
    "connect",
    "connect_in_loop",
    "holder_of",
    "how_to_reach",
    "interface_of",
    "is_local",
    "is_loopback_name",
    "not_a_store",
    "own_addresses",
    "own_network_problem",
    "peer_uid",
    "resolve",
    "set_up_for_messages",
    "silent",
    "tcpstore_wire",
]
