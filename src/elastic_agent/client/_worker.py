"""A worker's view of itself: :class:`Worker`, and inside it, separate, its :class:`Placement`.

Written by hand rather than as dataclasses or named tuples: importing either costs this module's user
several times what everything else here does.
"""

from __future__ import annotations

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import NoReturn, dataclass_transform
else:

    def dataclass_transform(**_options):
        return lambda kind: kind


# To type checkers these are frozen dataclasses: typed when made, and not assignable afterwards.
@dataclass_transform(frozen_default=True, kw_only_default=True)
class Record:
    """An immutable, comparable, picklable value whose fields are its class's ``__slots__``, in order."""

    # Each subclass maps field to its documentation, so that help() shows it beside the field.
    __slots__: dict[str, str] = {}

    def __init__(self, **fields: object) -> None:
        names = type(self).__slots__
        if fields.keys() != names.keys():
            odd = sorted(fields.keys() ^ names.keys())
            raise TypeError(f"{type(self).__name__}: missing or unknown fields {odd}; expected {list(names)}")
        for name, value in fields.items():
            object.__setattr__(self, name, value)

    def __setattr__(self, name: str, value: object) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be set: the launcher defines it")

    def __delattr__(self, name: str) -> NoReturn:
        raise AttributeError(f"{type(self).__name__}.{name} cannot be deleted")

    def _fields(self) -> dict[str, object]:
        return {name: getattr(self, name) for name in type(self).__slots__}

    def _shown(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self._fields().items())

    def __eq__(self, other: object) -> bool:
        if type(other) is not type(self):
            return NotImplemented
        return self._fields() == other._fields()

    def __hash__(self) -> int:
        return hash((type(self), *self._fields().values()))

    def __reduce__(self) -> tuple[object, tuple[type, dict[str, object]]]:
        # The default would set the fields one by one, which __setattr__ rejects.
        return (_rebuild, (type(self), self._fields()))


def _rebuild(kind: type[Record], fields: dict[str, object]) -> Record:
    return kind(**fields)


class Placement(Record):
    """The position of this worker in the world of *this generation*. UNSTABLE, all of it.

    The next generation may give every one of these numbers to another worker. They are for setting up
    the process group, sharding the data and deciding who logs; never for naming anything that outlives
    the generation, such as a checkpoint. All are counts or numbers from 0; none has a unit.
    """

    __slots__ = {  # noqa: RUF023 - this order is the repr's
        "rank": "This worker's number in the world, 0 to world_size - 1. UNSTABLE.",
        "local_rank": "This worker's number on its node, 0 to local_world_size - 1; "
        "usually the index of its GPU. UNSTABLE.",
        "world_size": "How many workers the world has, over all nodes. UNSTABLE.",
        "local_world_size": "How many workers this node has; nodes may differ. UNSTABLE.",
        "node_rank": "This node's number in the world, 0 to node_count - 1 (torch: group rank). UNSTABLE.",
        "node_count": "How many nodes the world has. UNSTABLE.",
        "generation": "The number of this world; it only grows, by one or more. 0 without elastic-agent.",
        "restarts": "Restarts charged to the run's budget so far. Under elastic-agent one count for the "
        "whole run; under torchrun its agent's own count (TORCHELASTIC_RESTART_COUNT).",
        "first_generation": "Whether this is generation 1. A run that is resumed under the same id continues "
        "counting and has none. Not the same as 'there is no checkpoint': look for one. Without elastic-agent only: "
        "restarts == 0.",
    }
    rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int
    node_count: int
    generation: int
    restarts: int
    first_generation: bool

    def __repr__(self) -> str:
        return f"Placement(UNSTABLE, this generation only: {self._shown()})"


class Worker(Record):
    """The stable identity of this worker, and in :attr:`placement` its position in this generation.

    The fields directly on this object are *stable*: they may name things that outlive a generation.
    What is in ``placement`` may not. For what "stable" means without elastic-agent see
    :func:`elastic_agent.client.current`.
    """

    __slots__ = {  # noqa: RUF023 - this order is the repr's
        "run_id": "The training job. Stable across every restart, of any process or machine. "
        "Name checkpoints after it.",
        "node_id": "This node's name in the run. Stable across restarts of its agent and of the machine.",
        "worker_id": "'<node_id>/<slot>': this worker's name in the run. Stable; a new process has it in "
        "each generation. Contains a slash.",
        "slot": "The number of this worker on its node, from 0. Stable as a name; the number of slots may change.",
        "incarnation": "One lifetime of this node in the run, random. Stable across generations until its agent "
        "restarts or has to rejoin; 'none' without elastic-agent.",
        "placement": "Rank, world size and the like: UNSTABLE, see Placement.",
    }
    run_id: str
    node_id: str
    worker_id: str
    slot: int
    incarnation: str
    placement: Placement

    def __repr__(self) -> str:
        return f"Worker({self._shown()})"
