"""The interpreter that runs the script, in a process of its own: torch may hang or abort there."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
from collections.abc import Mapping
from typing import TypeVar

import msgspec
from msgspec import Struct

from elastic_agent.values import PortRange

from . import probe
from .records import Reduced

T = TypeVar("T", bound=Struct)

START_S = 60.0
"""How long the interpreter may take to import torch, from a slow disk."""
REDUCE_S = {"gloo": 8.0, "nccl": 15.0}
"""How long an all-reduce may take, by its backend."""
PACKAGES = (
    "accelerate", "datasets", "deepspeed", "flash-attn", "lightning", "megatron-core", "msgspec", "numpy",
    "pytorch-lightning", "torch", "torchvision", "transformers", "triton",
)  # fmt: skip
"""Distributions whose versions are compared."""


class Installed(Struct, frozen=True):
    """The Python, the packages and the libraries of an interpreter."""

    python: str = ""
    versions: dict[str, str] = {}
    """Of those of :data:`PACKAGES` that are installed."""
    cuda: str = ""
    """The CUDA version for which torch was built."""
    nccl: str = ""
    nccl_library: str = ""
    """The file that torch has loaded; empty: it is part of torch, or there is none."""
    store_port: int = 0
    """Where the process hosts a store of torch; 0: there is none."""
    problem: str = ""
    """Why torch cannot be imported, although it is installed."""
    start_problem: str = ""
    """Why the interpreter could not be asked."""


class Interpreter:
    """The process of an interpreter that runs :mod:`.probe`."""

    def __init__(self, python: str, environ: Mapping[str, str]) -> None:
        """Start nothing yet. ``environ``: the environment of the workers."""
        self._python = python
        self._environ = environ
        self._process: asyncio.subprocess.Process | None = None
        self._errors = os.memfd_create("errors of the doctor's interpreter")

    async def ask(self, ports: PortRange | None, *, hosts_store: bool) -> Installed:
        """Start it, and ask what it has. ``ports``: for its store; None: an ephemeral one."""
        offered = (0, 0) if ports is None else (ports.low, ports.high)
        wanted = {
            "packages": PACKAGES,
            "ports": offered if hosts_store else None,
            "signal": int(signal.SIGKILL),
        }
        try:
            self._process = await asyncio.create_subprocess_exec(
                self._python,
                probe.__file__,
                msgspec.json.encode(wanted).decode(),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                env=dict(self._environ),
                start_new_session=True,  # Ctrl-C is for the command, which ends it
            )
        except OSError as failure:
            return Installed(start_problem=failure.strerror or str(failure))
        answer = await self._answer(Installed, START_S)
        if answer is None:
            return Installed(start_problem=await self._last_words(START_S, " (it imports torch)"))
        return answer

    async def reduce(
        self, backend: str, place: tuple[int, int], store: tuple[str, int], environment: Mapping[str, str]
    ) -> Reduced:
        """Take part in an all-reduce.

        Args:
            backend: ``gloo`` or ``nccl``.
            place: the rank, and the number of ranks.
            store: host and port of the store of the first rank.
            environment: variables that the agent sets for its workers.
        """
        process, limit_s = self._process, REDUCE_S[backend]
        assert process is not None  # it has told the port of a store
        assert process.stdin is not None
        task = {
            "backend": backend,
            "rank": place[0],
            "world_size": place[1],
            "host": store[0],
            "port": store[1],
        }
        line = msgspec.json.encode({**task, "environment": environment, "limit_s": limit_s})
        with contextlib.suppress(OSError):  # it has died: no answer will come
            process.stdin.write(line + b"\n")
            await process.stdin.drain()
        answer = await self._answer(Reduced, 2 * limit_s + 2.0)
        if answer is None:
            return Reduced(f"its process did not answer: {await self._last_words(2 * limit_s)}")
        return answer

    async def _answer(self, kind: type[T], timeout_s: float) -> T | None:
        """Read the next answer; None: there is none, in time."""
        assert self._process is not None  # it was started
        assert self._process.stdout is not None
        with contextlib.suppress(TimeoutError, ValueError):  # ValueError: a line that does not end
            async with asyncio.timeout(timeout_s):
                return decoded(kind, await self._process.stdout.readline())
        return None

    async def _last_words(self, waited_s: float, doing: str = "") -> str:
        """Return why the process, which did this meanwhile, has not answered; it ends."""
        process = self._process
        assert process is not None  # it was started
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(1.0):  # its output has ended a little before it
                await process.wait()
        code = process.returncode
        if code is None:
            self._kill()
            return f"no answer within {waited_s:g} s{doing}"
        written = os.pread(self._errors, os.fstat(self._errors).st_size, 0)
        last = written.decode("utf-8", "replace").strip().splitlines()[-1:]
        return last[0][:400] if last else f"exit code {code}"

    def _kill(self) -> None:
        """Kill it, and what it has started: the interpreter may be a script that starts another one."""
        if self._process is not None and self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._kill()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(1.0):  # a daemon that it has started may keep its output open
                    await self._process.wait()
        os.close(self._errors)


def decoded(kind: type[T], line: bytes) -> T | None:
    """Return an answer of the program; None: this is none."""
    try:
        return msgspec.json.decode(line, type=kind)
    except (ValueError, RecursionError):
        return None
