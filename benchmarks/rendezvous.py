"""N nodes meet at one store, all at once, and meet again after a failure: elastic-agent beside torch's own.

``form``: from the word to begin, connections included, until the last of N nodes has the sealed world. ``re-form``:
from one node's failure until the last has the next one. ``ready to start`` also counts what elastic-agent does before
it starts workers: renew the lease, look at the plan once more, dial the workers' store. ``all told``: from one node's
request that the run ends until the last node gives its workers the notice; torch has no such thing.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from elastic_agent.testing.processes import free_port

from .figures import Figure, Options, Result, progress
from .scene import boottime_s

OURS, SECURED, TORCH = "elastic-agent", "elastic-agent, with a secret", "torch c10d"
SIZES = (64, 256, 1024)
TORCH_SIZES = (64, 256)
FORM_TARGETS_S = {256: 1.5, 1024: 3.0}
REFORM_TARGETS_S = {256: 1.0, 1024: 2.0}
TOLD_TARGET_S = 0.1
NODES_PER_PROCESS = 128
"""More nodes than ``ONE_PROCESS_UP_TO`` are divided into processes of so many: one interpreter lock is not enough."""
ONE_PROCESS_UP_TO = 256
RUNS_OF_LARGE = 3
NOTE = (
    f"Up to {ONE_PROCESS_UP_TO} nodes are threads of one process, for both; more are divided into processes of "
    f"{NODES_PER_PROCESS}. On real machines every node has an interpreter of its own."
)
CALM_S = 1.0
LIMIT_S = 120.0


class Crowd:
    """Processes with some of the nodes each, told by words what to do."""

    def __init__(self, commands: list[list[str]]) -> None:
        quiet = {**os.environ, "TORCH_CPP_LOG_LEVEL": "FATAL"}
        self._processes = [
            subprocess.Popen(
                [sys.executable, "-m", *command],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                text=True,
                env=quiet,
            )
            for command in commands
        ]
        self._limit = threading.Timer(LIMIT_S, self._kill)
        self._limit.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._limit.cancel()
        self._kill()
        for process in self._processes:
            process.communicate()

    def _kill(self) -> None:
        for process in self._processes:
            process.kill()

    def say(self, first: str, others: str | None = None) -> None:
        """A word to the first process, and one to the others."""
        for number, process in enumerate(self._processes):
            assert process.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                process.stdin.write(f"{first if number == 0 or others is None else others}\n")
                process.stdin.flush()

    def hear(self, event: str) -> list[dict[str, Any]]:
        """This event, of every process.

        Raises:
            EOFError: one of them ended instead, or the time is up.
        """
        return [self._hear_one(process, event) for process in self._processes]

    def _hear_one(self, process: subprocess.Popen[str], event: str) -> dict[str, Any]:
        assert process.stdout is not None
        for line in process.stdout:
            told: dict[str, Any] = json.loads(line)
            if told["event"] == event:
                return told
        raise EOFError(event)


def run(options: Options) -> Result:
    figures: dict[tuple[str, str], Figure] = {}
    sizes = SIZES[:2] if options.quick else SIZES
    for number in range(options.times):
        for size in sizes:
            if size > 256 and number >= RUNS_OF_LARGE:
                continue
            _record(figures, size, OURS, meet(size))
            if size == 64:
                _record(figures, size, SECURED, meet(size, "--secret"))
            if size == 64 or (size in TORCH_SIZES and number == 0 and not options.quick):  # 256 take minutes
                _record(figures, size, TORCH, _torchs(size))
    return Result("rendezvous", list(figures.values()), [NOTE])


def _record(
    figures: dict[tuple[str, str], Figure], size: int, who: str, found: dict[str, float | str]
) -> None:
    progress(f"{size} nodes, {who}: {found}")
    targets = {
        "form": FORM_TARGETS_S.get(size),
        "re-form": REFORM_TARGETS_S.get(size),
        "all told": TOLD_TARGET_S,
    }
    for what, value in found.items():
        target = targets.get(what) if who == OURS else None
        name = f"{size} nodes, {what}"
        figures.setdefault((name, who), Figure(name, who, "s", target)).add(value)


def meet(size: int, *more: str) -> dict[str, float | str]:
    """So many of our nodes form a world and the next; ``more``: options of ``benchmarks.many_nodes``."""
    parts = 1 if size <= ONE_PROCESS_UP_TO else size // NODES_PER_PROCESS
    port = free_port()
    bounds = [size * part // parts for part in range(parts + 1)]
    with tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-") as folder:
        commands = [
            ["benchmarks.many_nodes", str(first), str(last), str(size), str(port), str(Path(folder)), *more]
            for first, last in itertools.pairwise(bounds)
        ]
        return _measure(commands, ("sealed", "started"), told=True)


def _torchs(size: int) -> dict[str, float | str]:
    return _measure([["benchmarks.many_handlers", str(size), str(free_port())]], ("sealed",))


def _measure(
    commands: list[list[str]], moments: tuple[str, ...], *, told: bool = False
) -> dict[str, float | str]:
    found: dict[str, float | str] = {}
    names = {"sealed": "", "started": ", ready to start"}
    with Crowd(commands) as crowd:
        for phase, words in (("form", ("begin", "begin")), ("re-form", ("fail", "watch"))):
            try:
                crowd.hear("here" if phase == "form" else "calm")
                time.sleep(CALM_S)
                begun_s = boottime_s()
                crowd.say(*words)
                for moment in moments:
                    last_s = max(told["moment"] for told in crowd.hear(moment))
                    found[phase + names[moment]] = round(last_s - begun_s, 3)
            except EOFError:
                found[phase] = f"not in {LIMIT_S:.0f} s"
                return found
        if told:
            crowd.hear("done")
            time.sleep(CALM_S)
            begun_s = boottime_s()
            crowd.say("ask", "listen")
            found["all told"] = round(max(answer["moment"] for answer in crowd.hear("told")) - begun_s, 3)
    return found
