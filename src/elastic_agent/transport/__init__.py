"""Access to a store: the interfaces that every store implements, and what they share.

The only code that accesses a store. Each store is a package of its own (:mod:`.c10d`, :mod:`.etcd`), which is not
imported from here: each loads a large library.
"""

from __future__ import annotations

from .abandonable_thread import AbandonableThread
from .addresses import connect, interface_of, is_local, is_loopback_name, own_network_problem, resolve
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
)
from .munge import Munge, MungeError
from .name_lookups import shorten_lookups
from .port_holder import holder_of
from .sealing import Seal, Secret, Unverified

__all__ = [
    "AbandonableThread",
    "CoordinatorLink",
    "ExchangeLink",
    "Munge",
    "MungeError",
    "NodeLink",
    "NotAStoreError",
    "Obstacle",
    "OtherVersionError",
    "ReportLink",
    "RunView",
    "Seal",
    "Secret",
    "Snapshot",
    "StoreLostError",
    "TransportError",
    "UnreachableError",
    "Unverified",
    "WrongKeyError",
    "connect",
    "holder_of",
    "interface_of",
    "is_local",
    "is_loopback_name",
    "own_network_problem",
    "resolve",
    "shorten_lookups",
]
