"""A worker's view of itself: :class:`Worker`, and inside it, separate, its :class:`Placement`."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, repr=False)
class Placement:
    """The position of this worker in the world of *this generation*. UNSTABLE, all of it.

    The next generation may give every one of these numbers to another worker. They are for setting up
    the process group, sharding the data and deciding who logs; never for naming anything that outlives
    the generation, such as a checkpoint. All are counts or numbers from 0; none has a unit.
    """

    rank: int
    """This worker's number in the world, 0 to world_size - 1. UNSTABLE."""
    local_rank: int
    """This worker's number on its node, 0 to local_world_size - 1; usually the index of its GPU. UNSTABLE."""
    world_size: int
    """The number of workers of the world, over all nodes. UNSTABLE."""
    local_world_size: int
    """The number of workers of this node; nodes may differ. UNSTABLE."""
    node_rank: int
    """This node's number in the world, 0 to node_count - 1 (torch: group rank). UNSTABLE."""
    node_count: int
    """The number of nodes of the world. UNSTABLE."""
    generation: int
    """The number of this world; it only grows, by one or more. 0 without elastic-agent."""
    restarts: int
    """Restarts charged to the run's budget so far. Under elastic-agent one count for the whole run; under torchrun its
    agent's own count (TORCHELASTIC_RESTART_COUNT)."""
    first_generation: bool
    """True in generation 1. A run that is resumed under the same id continues counting and has none. Not the
    same as 'there is no checkpoint': look for one. Without elastic-agent only: restarts == 0."""

    def __repr__(self) -> str:
        fields = ", ".join(f"{name}={value!r}" for name, value in vars(self).items())
        return f"Placement(UNSTABLE, this generation only: {fields})"


@dataclass(frozen=True, kw_only=True)
class Worker:
    """The stable identity of this worker, and in :attr:`placement` its position in this generation.

    The fields directly on this object are *stable*: they may name things that outlive a generation.
    What is in ``placement`` may not. For what "stable" means without elastic-agent see
    :func:`elastic_agent.client.current`.
    """

    run_id: str
    """The training job. Stable across every restart, of any process or machine. Name checkpoints after it."""
    node_id: str
    """This node's name in the run. Stable across restarts of its agent and of the machine."""
    worker_id: str
    """'<node_id>/<slot>': this worker's name in the run. Stable; a new process has it in each generation. Contains a
    slash."""
    slot: int
    """The number of this worker on its node, from 0. Stable as a name; the number of slots may change."""
    incarnation: str
    """One lifetime of this node in the run, random. Stable across generations until its agent restarts or has to
    rejoin; 'none' without elastic-agent."""
    placement: Placement
    """Rank, world size and the like: UNSTABLE, see Placement."""
