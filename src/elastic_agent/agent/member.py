"""The member record with which a node takes part in a run."""

from __future__ import annotations

from elastic_agent.agent.worker_group.command import fingerprint
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import RECORD_VERSION, Member, Policy, State

from .identity import NodeIdLock


def member_record(
    settings: Settings, policy: Policy, slots: int, lock: NodeIdLock, incarnation: str
) -> Member:
    """The first record of this incarnation; ``slots``: how many workers the node runs."""
    return Member(
        version=RECORD_VERSION,
        node_id=lock.node_id,
        incarnation=incarnation,
        address=settings.local_addr or "127.0.0.1",  # the session puts the right one in when connected
        slots=slots,
        state=State.READY,
        generation=0,
        policy=policy,
        stop_s=max(settings.restart_grace, settings.shutdown_timeout),
        replaces=(lock.predecessor,) if lock.predecessor else (),
        preferred_rank=settings.node_rank,
        role=settings.role,
        fingerprint=fingerprint(settings),
    )
