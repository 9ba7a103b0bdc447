"""Reads a :class:`Worker` from the environment that a launcher gave its workers.

elastic-agent sets its own variables and all of torchrun's; torchrun sets only those; plain Python sets
none. One reader serves all three: the placement comes from torchrun's variables, which any of them may have set,
and missing values are filled in only where a world of one worker leaves no choice.
"""

from __future__ import annotations

import os

from elastic_agent import worker_variables as variables
from elastic_agent.client._worker import Placement, Worker

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping

NO_LAUNCHER_RUN_ID = "local"
NO_INCARNATION = "none"


class MalformedEnvironmentError(ValueError):
    """A variable that the launcher sets is missing or invalid; one line with its name and the reason."""


def read_worker(environ: Mapping[str, str]) -> Worker:
    """Return the worker that ``environ`` describes.

    Raises:
        MalformedEnvironmentError: naming the variable, its value and what was expected.
    """
    if variables.GENERATION in environ:  # unlike the run id and the node id, never set by hand
        return _worker_of_agent(environ)
    restarts = _number(environ, "TORCHELASTIC_RESTART_COUNT", 0)
    placement = _placement(environ, generation=0, restarts=restarts, first_generation=restarts == 0)
    run_id_by = variables.RUN_ID if variables.RUN_ID in environ else "TORCHELASTIC_RUN_ID"
    return _worker(
        run_id=_name(environ, run_id_by, NO_LAUNCHER_RUN_ID),
        node_id=_name(environ, variables.NODE_ID, os.uname().nodename),
        slot=placement.local_rank,
        incarnation=NO_INCARNATION,
        placement=placement,
    )


def number_at_least_0(variable: str, value: str, expected: str) -> int:
    """Return ``value`` as a whole number; MalformedEnvironmentError names ``variable`` when it is none."""
    # int() alone would take " 1", "1_0", "+1" and digits of other scripts.
    if value.isascii() and value.isdigit() and len(value) < 19:
        return int(value)
    raise _malformed(variable, value, expected)


def _worker_of_agent(environ: Mapping[str, str]) -> Worker:
    first = _name(environ, variables.FIRST_GENERATION)
    if first not in ("0", "1"):
        raise _malformed(variables.FIRST_GENERATION, first, "0 or 1")
    placement = _placement(
        environ,
        generation=_number(environ, variables.GENERATION),
        restarts=_number(environ, variables.RESTARTS),
        first_generation=first == "1",
    )
    return _worker(
        run_id=_name(environ, variables.RUN_ID),
        node_id=_name(environ, variables.NODE_ID),
        slot=_number(environ, variables.SLOT),
        incarnation=_name(environ, variables.INCARNATION),
        placement=placement,
    )


def _worker(run_id: str, node_id: str, slot: int, incarnation: str, placement: Placement) -> Worker:
    return Worker(
        run_id=run_id,
        node_id=node_id,
        worker_id=f"{node_id}/{slot}",
        slot=slot,
        incarnation=incarnation,
        placement=placement,
    )


def _placement(
    environ: Mapping[str, str], *, generation: int, restarts: int, first_generation: bool
) -> Placement:
    world_size = _size(environ, "WORLD_SIZE", None if "RANK" in environ else 1)
    # Alone in the world, every other number can only be one thing; scripts that also run without a
    # launcher often set RANK and WORLD_SIZE themselves and nothing else.
    alone = world_size == 1
    local_world_size = _size(environ, "LOCAL_WORLD_SIZE", 1 if alone else None, world_size)
    node_count = _size(environ, "GROUP_WORLD_SIZE", 1 if alone else None, world_size)
    first = 0 if alone else None
    return Placement(
        rank=_index(environ, "RANK", first, "WORLD_SIZE", world_size),
        local_rank=_index(environ, "LOCAL_RANK", first, "LOCAL_WORLD_SIZE", local_world_size),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=_index(environ, "GROUP_RANK", first, "GROUP_WORLD_SIZE", node_count),
        node_count=node_count,
        generation=generation,
        restarts=restarts,
        first_generation=first_generation,
    )


def _size(environ: Mapping[str, str], variable: str, default: int | None, largest: int | None = None) -> int:
    limit = "" if largest is None else f" and at most WORLD_SIZE={largest}"
    expected = f"a whole number, at least 1{limit}"
    size = _number(environ, variable, default, expected)
    if size < 1 or (largest is not None and size > largest):
        raise _malformed(variable, environ[variable], expected)
    return size


def _index(environ: Mapping[str, str], variable: str, default: int | None, of: str, size: int) -> int:
    expected = f"a whole number from 0 to {size - 1}, as {of}={size}"
    index = _number(environ, variable, default, expected)
    if index >= size:
        raise _malformed(variable, environ[variable], expected)
    return index


def _number(
    environ: Mapping[str, str],
    variable: str,
    default: int | None = None,
    expected: str = "a whole number, at least 0",
) -> int:
    value = environ.get(variable)
    if value is not None:
        return number_at_least_0(variable, value, expected)
    if default is None:
        raise _malformed(variable, None, expected)
    return default


def _name(environ: Mapping[str, str], variable: str, default: str | None = None) -> str:
    value = environ.get(variable, default)
    if not value:
        raise _malformed(variable, value, "a string that is not empty")
    return value


def _malformed(variable: str, value: str | None, expected: str) -> MalformedEnvironmentError:
    seen = f"{variable} is not set" if value is None else f"{variable}={value!r:.100}"
    return MalformedEnvironmentError(
        f"{seen} in the environment; expected {expected}. The launcher sets it: start the script with "
        "elastic-agent or torchrun, or directly with python and none of their variables set."
    )
