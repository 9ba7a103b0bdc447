"""etcd: the nodes' and the coordinator's links to one run."""

from __future__ import annotations

from .links import (
    EtcdLink,
    KeptLeases,
    Leadership,
    NotLeaderError,
    RunKeys,
    await_vacancy,
    campaign_for,
    run_life,
    store_id,
)

__all__ = [
    "EtcdLink",
    "KeptLeases",
    "Leadership",
    "NotLeaderError",
    "RunKeys",
    "await_vacancy",
    "campaign_for",
    "run_life",
    "store_id",
]
