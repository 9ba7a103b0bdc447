"""etcd: the nodes' and the coordinator's links to one run."""

from __future__ import annotations

from .links import (
    DeposedError,
    EtcdLink,
    KeptLeases,
    RunKeys,
    Term,
    await_vacancy,
    run_life,
    stand,
    store_id,
)

__all__ = [
    "DeposedError",
    "EtcdLink",
    "KeptLeases",
    "RunKeys",
    "Term",
    "await_vacancy",
    "run_life",
    "stand",
    "store_id",
]
