"""What the client costs a training script: a heartbeat, a look at its identity, and the import.

    python benchmarks/client.py [--json FILE] [--rounds N]

Prints medians, with the fastest and slowest round beside them. A heartbeat is measured in a process that
looks like a worker, its cell in a real file; the import as the time that a whole interpreter takes with it,
less that of one without, in alternation.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
import timeit
from pathlib import Path
from typing import NamedTuple

from elastic_agent.client._cells import HeartbeatFile

CALLS_PER_ROUND = 20_000
LAUNCHER_PREFIXES = ("ELASTIC_AGENT_", "TORCHELASTIC_", "GROUP_", "LOCAL_", "RANK", "WORLD_SIZE")


class Figure(NamedTuple):
    """One line of the table; ``unit`` holds for the three numbers."""

    what: str
    unit: str
    median: float
    fastest: float
    slowest: float


def figure(what: str, unit: str, samples: list[float]) -> Figure:
    return Figure(what, unit, statistics.median(samples), min(samples), max(samples))


def measure_calls(rounds: int) -> list[Figure]:
    """The calls themselves, in this process, loop overhead of some 20 ns included."""
    from elastic_agent import client

    step = 123_456
    calls = {
        "heartbeat(step)": lambda: client.heartbeat(step),
        "heartbeat()": lambda: client.heartbeat(),
        "nothing, called the same way": lambda: None,
        "current()": lambda: client.current(),
    }
    figures = []
    for what, call in calls.items():
        timer = timeit.Timer(call)
        samples = [timer.timeit(CALLS_PER_ROUND) / CALLS_PER_ROUND * 1e9 for _ in range(rounds)]
        figures.append(figure(what, "ns", samples))
    return figures


def interpreter_time_s(code: str, environment: dict[str, str]) -> float:
    began_s = time.perf_counter()
    subprocess.run([sys.executable, "-c", code], env=environment, check=True)
    return time.perf_counter() - began_s


def measure_import(what: str, rounds: int, environment: dict[str, str]) -> Figure:
    samples = []
    interpreter_time_s("from elastic_agent import client", environment)  # compiles it, where it may be kept
    for _ in range(rounds):
        bare_s = interpreter_time_s("pass", environment)
        with_client_s = interpreter_time_s("from elastic_agent import client", environment)
        samples.append((with_client_s - bare_s) * 1e3)
    return figure(what, "ms", samples)


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
        HeartbeatFile.create(Path(folder) / "heartbeats", 1) as file,
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
            measure_import("import, under plain python", rounds, compiled),
            measure_import("import, under elastic-agent", rounds, {**compiled, **under_agent}),
            measure_import("the same, never compiled", rounds, {**never_compiled, **under_agent}),
        ]
        os.environ.update(under_agent)
        figures += measure_calls(rounds)
        beats, _ = file.read(0)
        expected = 2 * rounds * CALLS_PER_ROUND
        if beats != expected:
            raise SystemExit(
                f"the agent's side saw {beats} beats; expected {expected}: measured nothing real"
            )
    return figures


def print_table(figures: list[Figure]) -> None:
    print(f"{'':32}{'median':>12}{'fastest':>12}{'slowest':>12}")
    for one in figures:
        numbers = "".join(f"{number:9.2f} {one.unit}" for number in one[2:])
        print(f"{one.what:32}{numbers}")


def main() -> None:
    parser = argparse.ArgumentParser(description="Measure what the client module costs a training script.")
    parser.add_argument("--json", metavar="FILE", type=Path, help="also write the figures to FILE")
    parser.add_argument("--rounds", type=int, default=31, help="samples per figure (default: 31)")
    options = parser.parse_args()
    if options.rounds < 1:
        parser.error(f"--rounds {options.rounds}: expected at least 1")
    figures = measure(options.rounds)
    print_table(figures)
    if options.json is not None:
        record = {
            "benchmark": "client",
            "python": sys.version.split()[0],
            "rounds": options.rounds,
            "calls_per_round": CALLS_PER_ROUND,
            "figures": [one._asdict() for one in figures],
        }
        options.json.write_text(json.dumps(record, indent=2) + "\n")


if __name__ == "__main__":
    main()
