"""How long a user waits for ``elastic-agent status`` in a run of many nodes.

One real agent hosts the store and runs a program; the other nodes are sessions in another process, as in
``benchmarks/rendezvous.py``. Each node has a report of eight workers in the store.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
import time

from elastic_agent.diagnosis.records import (
    Collective,
    GroupProgress,
    NodeReport,
    WorkerReport,
    WorkerState,
    encode_bulletin,
)
from elastic_agent.testing.ports import free_port
from elastic_agent.transport.c10d import dial_reports
from elastic_agent.values import Endpoint

from .figures import Figure, Result
from .options import Options, progress
from .rendezvous import Crowd

SIZES = (2, 64)
WORKERS = 8
ASKED, QUICK_ASKED = 15, 5
TARGET_S = 0.3
PATIENCE_S = 20.0
COMMAND = (sys.executable, "-m", "elastic_agent")
RUN_ID = "benchmark"


def run(options: Options) -> Result:
    figures = [_measure(size, QUICK_ASKED if options.quick else ASKED) for size in SIZES]
    return Result("status", figures, [])


def _measure(size: int, asked: int) -> Figure:
    figure = Figure(f"elastic-agent status, {size} nodes", "elastic-agent", "s", TARGET_S)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="elastic-agent-benchmark-") as folder:
        state = ("--state-dir", f"{folder}/state")
        meeting = ("--rdzv-endpoint", f"127.0.0.1:{port}", "--rdzv-id", RUN_ID, "--nnodes", str(size))
        agent = subprocess.Popen(
            [*COMMAND, *meeting, *state, "--node-id", "n0", "--no-python", "sleep", "600"],
            stderr=subprocess.DEVNULL,
        )
        try:
            others = ["benchmarks.many_nodes", "1", str(size), str(size), str(port), folder]
            with Crowd([others]) as crowd:
                crowd.hear("here")
                crowd.say("begin")
                crowd.hear("started")
                _write_reports(port, size)
                for _ in range(asked):
                    figure.add(_ask(size, state))
        finally:
            agent.send_signal(signal.SIGTERM)
            agent.wait(PATIENCE_S)
    progress(f"status of {size} nodes: {figure.median:.3f} s")
    return figure


def _write_reports(port: int, size: int) -> None:
    last = Collective(4711, "all_reduce", 25_000_000, "train.py:88")
    groups = (GroupProgress("0", 4711, 4711, 4710, last),)
    workers = tuple(
        WorkerReport(slot, slot, WorkerState.RUNNING, 1000 + slot, step=77, progress=groups, waits=0.5)
        for slot in range(WORKERS)
    )
    link = dial_reports(Endpoint("127.0.0.1", port), RUN_ID, PATIENCE_S)
    for number in range(1, size):
        report = NodeReport(f"n{number}", f"i{number}", 1, time.time(), host=f"host{number}", workers=workers)
        link.write_report(report.node_id, encode_bulletin([report]))
    link.close()


def _ask(size: int, state: tuple[str, ...]) -> float | str:
    """The time of one command, or what was wrong with its answer."""
    began_s = time.perf_counter()
    done = subprocess.run([*COMMAND, "status", RUN_ID, *state], capture_output=True, text=True, check=False)
    took_s = time.perf_counter() - began_s
    rows = sum("all_reduce 4711" in line for line in done.stdout.splitlines())
    return took_s if rows == size - 1 else f"{rows} rows with reports; expected {size - 1}: {done.stderr}"
