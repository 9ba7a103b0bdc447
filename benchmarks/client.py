"""What the client costs a training script: a heartbeat, a look at its identity, and the import.

A heartbeat is measured in a process that looks like a worker, its cell in a real file; the import as the time that
a whole interpreter takes with it, less that of one without, in alternation.
"""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import time
import timeit
from contextlib import closing

from elastic_agent.client._cells import HeartbeatFile

from .figures import Figure, Result
from .options import Options

CALLS_PER_ROUND = 20_000
ROUNDS, QUICK_ROUNDS = 31, 7
WHO = "client"
BEAT_TARGET_NS = 1_000.0
IMPORT_TARGET_MS = 10.0
LAUNCHER_PREFIXES = ("ELASTIC_AGENT_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "RANK", "WORLD_SIZE")


def run(options: Options) -> Result:
    return Result("client", measure(QUICK_ROUNDS if options.quick else ROUNDS))


def measure_calls(rounds: int) -> list[Figure]:
    """The calls themselves, in this process, loop overhead of some 20 ns included."""
    from elastic_agent import client

    step = 123_456
    calls = {
        "heartbeat(step)": lambda: client.heartbeat(step),
        "heartbeat()": lambda: client.heartbeat(),
        "nothing, called the same way": lambda: None,
        "notice()": lambda: client.notice(),
        "current()": lambda: client.current(),
    }
    figures = []
    for what, call in calls.items():
        timer = timeit.Timer(call)
        samples = [timer.timeit(CALLS_PER_ROUND) / CALLS_PER_ROUND * 1e9 for _ in range(rounds)]
        target = BEAT_TARGET_NS if what.startswith(("heartbeat", "notice")) else None
        figures.append(Figure(what, WHO, "ns", target, samples))
    return figures


def interpreter_time_s(code: str, environment: dict[str, str]) -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - began_s


def measure_import(
    what: str, rounds: int, environment: dict[str, str], target_ms: float | None = None
) -> Figure:
    """Beyond what a bare interpreter takes."""
    samples = []
    interpreter_time_s("from elastic_agent import client", environment)  # compiles it, where it may be kept
    for _ in range(rounds):
        bare_s = interpreter_time_s("pass", environment)
        with_client_s = interpreter_time_s("from elastic_agent import client", environment)
        samples.append((with_client_s - bare_s) * 1e3)
    return Figure(what, WHO, "ms", target_ms, samples)


def worker_variables(file: HeartbeatFile) -> dict[str, str]:
    """What an agent gives the only worker of a run."""
    ones = ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_WORLD_SIZE", "ELASTIC_AGENT_FIRST_GENERATION")
    zeros = ("RANK", "LOCAL_RANK", "GROUP_RANK", "ELASTIC_AGENT_SLOT", "ELASTIC_AGENT_RESTARTS")
    return {
        **dict.fromkeys(ones, "1"),
        **dict.fromkeys(zeros, "0"),
        "ELASTIC_AGENT_RUN_ID": "benchmark",
        "ELASTIC_AGENT_NODE_ID": "here",
        "ELASTIC_AGENT_INCARNATION": "one",
        "ELASTIC_AGENT_GENERATION": "1",
        "ELASTIC_AGENT_STACKS_SIGNAL": "12",
        "ELASTIC_AGENT_HEARTBEAT": file.path,
    }


def measure(rounds: int) -> list[Figure]:
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(HeartbeatFile.create(folder, 1)) as file,
    ):
        under_agent = worker_variables(file)
        bare = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_PREFIXES)}
        # Compiled code is kept in a place of our own, so that we know whether it is there.
        bare.pop("PYTHONDONTWRITEBYTECODE", None)
        compiled = {**bare, "PYTHONPYCACHEPREFIX": f"{folder}/compiled"}
        never_compiled = {
            **bare,
            "PYTHONPYCACHEPREFIX": f"{folder}/none",
            "PYTHONDONTWRITEBYTECODE": "1",
        }
        # Before this process becomes a worker itself: then the cell would no longer be free.
        figures = [
            measure_import("import, under plain python", rounds, compiled, IMPORT_TARGET_MS),
            measure_import(
                "import, under elastic-agent", rounds, {**compiled, **under_agent}, IMPORT_TARGET_MS
            ),
            measure_import("the same, never compiled", rounds, {**never_compiled, **under_agent}),
        ]
        before = dict(os.environ)
        os.environ.update(under_agent)
        try:
            figures += measure_calls(rounds)
        finally:
            os.environ.clear()
            os.environ.update(before)
        beats, _ = file.read(0)
        expected = 2 * rounds * CALLS_PER_ROUND
        if beats != expected:
            raise SystemExit(
                f"the agent's side saw {beats} beats; expected {expected}: measured nothing real"
            )
    return figures
