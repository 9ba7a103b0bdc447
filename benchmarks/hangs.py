"""What the detection of hangs costs a training step: a worker answers its agent's questions about its collectives.

The agent asks every five seconds. That is too little to be seen in the duration of steps, so the worker is asked
hundreds of times per second while it trains, and the CPU time of the thread that answers is divided by the number of
questions: the training waits for this thread at most so long, for Python's lock or for the core.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from elastic_agent.agent.worker_group.collectives import SUMMARY
from elastic_agent.agent.worker_group.stalls import LOOK_AT_LEAST_EVERY_S
from elastic_agent.worker_variables import GENERATION, PROGRESS, SLOT

from .figures import Figure, Result
from .options import Options

SCRIPT = Path(__file__).with_name("scripts") / "asked_steps.py"
STEP_S = 0.005
STEPS = 200
ROUNDS, QUICK_ROUNDS = 40, 8
PAUSE_S = 0.001
"""Between an answer and the next question."""
PATIENCE_S = 60.0
WHO = "worker"
SHARE_TARGET_PPM = 1000.0


def run(options: Options) -> Result:
    rounds = QUICK_ROUNDS if options.quick else ROUNDS
    with tempfile.TemporaryDirectory() as folder, socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as agent:
        address = f"elastic-agent-benchmark-{os.getpid()}"
        agent.bind(f"\0{address}")
        agent.settimeout(PATIENCE_S)
        variables = {PROGRESS: address, SLOT: "0", GENERATION: "1", "OMP_NUM_THREADS": "1"}
        with subprocess.Popen(
            [sys.executable, str(SCRIPT), f"file://{folder}/group", str(STEPS), str(STEP_S)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **variables},
        ) as worker:
            try:
                return Result("hangs", _measure(worker, agent, rounds), [])
            finally:
                worker.kill()


def _measure(worker: subprocess.Popen[str], agent: socket.socket, rounds: int) -> list[Figure]:
    assert worker.stdout is not None
    _, peer = agent.recvfrom(65536)
    worker.stdout.readline()
    step = Figure("step", WHO, "ms")
    question = Figure("CPU time of the worker per question", WHO, "µs")
    answer = Figure("question until its answer", WHO, "µs")
    for _ in range(rounds):
        before_s = _answering_s(worker.pid)
        round_s, questions = _round(worker, agent, peer, answer)
        step.add(round_s / STEPS * 1e3)
        question.add((_answering_s(worker.pid) - before_s) / questions * 1e6)
    share = Figure("share of the training's time", WHO, "ppm", SHARE_TARGET_PPM)
    share.add(statistics.median(question.samples) / 1e6 / LOOK_AT_LEAST_EVERY_S * 1e6)
    return [step, question, answer, share]


def _answering_s(pid: int) -> float:
    """CPU time of all threads but the main one, which trains; in seconds."""
    threads = [one for one in Path(f"/proc/{pid}/task").iterdir() if one.name != str(pid)]
    return sum(int((one / "schedstat").read_text().split()[0]) for one in threads) / 1e9


def _round(
    worker: subprocess.Popen[str], agent: socket.socket, peer: bytes, answer: Figure
) -> tuple[float, int]:
    """How long the steps took, in seconds, and how many questions were asked meanwhile."""
    assert worker.stdin is not None
    assert worker.stdout is not None
    worker.stdin.write("\n")
    worker.stdin.flush()
    questions, until_s = 0, time.monotonic() + STEPS * STEP_S
    while time.monotonic() < until_s:
        asked_s = time.perf_counter()
        agent.sendto(SUMMARY, peer)
        data = agent.recv(65536)
        answer.add((time.perf_counter() - asked_s) * 1e6)
        questions += 1
        if json.loads(data)["groups"][0]["enqueued"] < 1:
            raise SystemExit("the worker knows of no collective: measured nothing real")
        time.sleep(PAUSE_S)
    return float(worker.stdout.readline()), questions
