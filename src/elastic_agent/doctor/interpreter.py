"""Asks the interpreter that runs the script, in a process of its own: torch may hang or abort there."""

from __future__ import annotations

import re
import resource
from collections.abc import Iterator
from typing import TypeVar

import msgspec
from msgspec import Struct

from elastic_agent.agent.preflight import Finding, error, warning
from elastic_agent.agent.run_command import CommandError, run_command
from elastic_agent.diagnosis.differences import PACKAGES
from elastic_agent.printable import escaped, size_text

from . import interpreter_program, machine
from .records import Reduced

T = TypeVar("T", bound=Struct)

START_S = 60.0
"""The time that the interpreter may take to import torch, from a slow disk."""
REDUCE_S = {"gloo": 8.0, "nccl": 15.0}
"""The time that an all-reduce may take, by its backend, beside the import of torch."""


class Installed(Struct, frozen=True):
    """The Python, the packages and the libraries of an interpreter."""

    python: str = ""
    versions: dict[str, str] = {}
    """Of those packages that are installed."""
    cuda: str = ""
    """The CUDA version for which torch was built."""
    nccl: str = ""
    nccl_library: str = ""
    """The file that torch has loaded; empty: it is part of torch, or there is none."""
    problem: str = ""
    """Why torch cannot be imported, although it is installed."""
    start_problem: str = ""
    """Why the interpreter could not be asked."""


async def find_installed(python: str) -> Installed:
    """Ask an interpreter what it has."""
    try:
        return await _ask(python, ("installed", *PACKAGES), START_S, Installed, "the interpreter")
    except CommandError as failure:
        return Installed(start_problem=str(failure))


async def reduce(python: str, backend: str) -> Reduced:
    """Take part in an all-reduce over ``gloo`` or ``nccl``, as a worker of this interpreter would."""
    limit_s = REDUCE_S[backend]
    task = "reduce", backend, f"{limit_s:g}"
    try:
        return await _ask(python, task, 2 * limit_s + START_S / 2, Reduced, "its process")
    except CommandError as failure:
        return Reduced(str(failure))


async def _ask(python: str, task: tuple[str, ...], timeout_s: float, kind: type[T], shown: str) -> T:
    printed = await run_command([python, interpreter_program.__file__, *task], timeout_s, shown=shown)
    try:
        return msgspec.json.decode(printed, type=kind)
    except (ValueError, RecursionError):
        raise CommandError(f"{shown} printed {printed[:80]!r}; expected JSON") from None


def check_interpreter(installed: Installed, python: str, *, is_distributed: bool) -> Iterator[Finding]:
    """Check that the interpreter can be started, and imports torch if it is installed."""
    shown = escaped(python)
    where = " at the same path on all machines" if is_distributed else ""
    if problem := _lack_of_space(installed.start_problem or installed.problem):
        yield error("interpreter", f"{shown} cannot import torch: {problem}", machine.UNLIMITED)
    elif installed.start_problem:
        yield error(
            "interpreter",
            f"the interpreter {shown} cannot be started: {installed.start_problem}",
            f"install it{where}, or pass another --python-exec",
        )
    elif installed.problem:
        yield error(
            "interpreter",
            f"{shown} cannot import torch: {installed.problem}",
            "reinstall torch in that environment, or look at LD_LIBRARY_PATH and at the driver",
        )
    elif "torch" not in installed.versions:
        yield warning(
            "interpreter",
            f"torch is not installed for {shown}, so no all-reduce is performed",
            "pass the interpreter of the script as --python-exec, or install torch there",
        )


def _lack_of_space(problem: str) -> str:
    """Return the problem with the limit of address space, if that is why; empty: it is not."""
    space = machine.soft_limit(resource.RLIMIT_AS)
    if space == resource.RLIM_INFINITY or not re.search("memory|alloc", problem, re.IGNORECASE):
        return ""
    return f"{problem} (a process can have only {size_text(space)} of address space)"
