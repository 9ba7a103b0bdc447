"""Runs a training job on two local agents and kills one of the workers halfway through: `make demo`.

Exits with 0 if training resumed from its checkpoint and reached the accuracy of uninterrupted training, else with 1.
"""

from __future__ import annotations

import os
import queue
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType

from elastic_agent.testing.processes import free_port

EXAMPLES = Path(__file__).resolve().parent
DIGITS = EXAMPLES / "digits_ddp.py"
SLOTS = {"node-a": 2, "node-b": 1}
WORKERS = sum(SLOTS.values())
STEP_TIME_S = 0.04
LIMIT_S = 180.0
STOP_S = 10.0
TOLERANCE = 0.01

COLOURS = {"node-a": "36", "node-b": "35", "demo": "1;33"}
STARTED = re.compile(r"digits: started worker=(\S+) pid=(\d+) rank=(\d+) world=(\d+) generation=(\d+)")
STEP = re.compile(r"digits: step=(\d+)/(\d+) loss=\S+ world=(\d+) generation=(\d+)")
RESUMED = re.compile(r"digits: resumed step=(\d+)/\d+ .* generation=(\d+)")
DONE = re.compile(r"digits: done accuracy=(\S+)")


class DemoError(Exception):
    """The demo did not take the expected course."""


@dataclass(frozen=True)
class Line:
    node: str
    text: str
    at_s: float


@dataclass(frozen=True)
class Worker:
    """A worker process, as reported in the first line that it prints."""

    node: str
    worker_id: str
    pid: int
    rank: int
    generation: int


@dataclass
class Story:
    """The events so far. Times are readings of the monotonic clock in seconds; None: not yet happened."""

    begin_s: float = field(default_factory=time.monotonic)
    workers: dict[str, Worker] = field(default_factory=dict)
    first_step_s: float | None = None
    victim: Worker | None = None
    killed_s: float | None = None
    killed_after_step: int = 0
    resumed_at_step: int | None = None
    met_again_s: float | None = None
    recovered_s: float | None = None
    accuracy: float | None = None

    def since_kill(self, at_s: float | None) -> float:
        if at_s is None or self.killed_s is None:
            raise DemoError("no worker was killed, or training did not resume afterwards")
        return at_s - self.killed_s


class Agents:
    """The agents of both nodes, and the output of the agents and their workers in order of arrival."""

    def __init__(self, folder: Path) -> None:
        self._lines: queue.Queue[Line | None] = queue.Queue()
        self._folder = folder
        self._processes: dict[str, subprocess.Popen[str]] = {}

    def start(self, node: str, slots: int, port: int) -> None:
        shown = f"--rdzv-endpoint 127.0.0.1:{port} --nnodes 1:4 --nproc-per-node {slots}".split()
        # Not needed on real machines, which have different host names and state directories.
        hidden = ["--node-id", node, "--state-dir", str(self._folder / "state"), "--log-format", "console"]
        say("demo", f"on {node}:  elastic-agent {' '.join(shown)} examples/digits_ddp.py")
        process = subprocess.Popen(
            [*agent_command(), *shown, *hidden, str(DIGITS), *script_arguments(self._folder / "checkpoints")],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,  # only the demo receives Ctrl-C; it then stops the agents
        )
        self._processes[node] = process
        threading.Thread(target=self._read, args=(node, process), daemon=True).start()

    def _read(self, node: str, process: subprocess.Popen[str]) -> None:
        assert process.stdout is not None
        for text in process.stdout:
            self._lines.put(Line(node, text.rstrip("\n"), time.monotonic()))
        self._lines.put(None)

    def lines(self, deadline_s: float) -> Iterator[Line]:
        """The output of both agents, until both have closed it."""
        open_outputs = len(self._processes)
        while open_outputs:
            try:
                line = self._lines.get(timeout=max(0.0, deadline_s - time.monotonic()))
            except queue.Empty:
                raise DemoError(f"not finished after {LIMIT_S:.0f} s") from None
            if line is None:
                open_outputs -= 1
            else:
                yield line

    def exit_codes(self) -> dict[str, int]:
        return {node: process.wait(STOP_S) for node, process in self._processes.items()}

    def stop(self) -> None:
        """Stop the agents that are still running: by SIGTERM, and after a time by SIGKILL."""
        alive = [process for process in self._processes.values() if process.poll() is None]
        for process in alive:
            process.terminate()
        deadline_s = time.monotonic() + STOP_S
        for process in alive:
            try:
                process.wait(max(0.0, deadline_s - time.monotonic()))
            except subprocess.TimeoutExpired:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def main() -> int:
    signal.signal(signal.SIGTERM, interrupt)
    try:
        with tempfile.TemporaryDirectory(prefix="elastic-agent-demo-") as folder:
            demonstrate(Path(folder))
    except DemoError as failure:
        say("demo", f"FAILED: {failure}")
        return 1
    except KeyboardInterrupt:
        say("demo", "interrupted; both agents and their workers are stopped")
        return 130
    return 0


def interrupt(_number: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt


def demonstrate(folder: Path) -> None:
    say(
        "demo",
        "Two agents, as if on two machines: one runs 2 workers, the other 1. They train a network on real",
    )
    say(
        "demo",
        "handwritten digits. Halfway through, one worker is killed. The same command on each:",
    )
    agents = Agents(folder)
    port = free_port()
    story = Story()
    try:
        for node, slots in SLOTS.items():
            agents.start(node, slots, port)
        for line in agents.lines(story.begin_s + LIMIT_S):
            say(line.node, line.text)
            follow(story, line)
        exit_codes = agents.exit_codes()
    finally:
        agents.stop()
    if any(exit_codes.values()):
        raise DemoError(f"expected both agents to exit with 0, got {exit_codes}")
    say(
        "demo",
        "Both agents have finished. For comparison, the same training in one process, uninterrupted ...",
    )
    report(story, undisturbed_accuracy(folder))


def follow(story: Story, line: Line) -> None:
    """Record the event in a line of output; kill a worker when half of the steps are done."""
    if found := STARTED.search(line.text):
        worker_id, pid, rank, _, generation = found.groups()
        story.workers[worker_id] = Worker(line.node, worker_id, int(pid), int(rank), int(generation))
        if story.victim and int(generation) > story.victim.generation:
            story.met_again_s = line.at_s
    elif found := RESUMED.search(line.text):
        if story.victim and int(found[2]) > story.victim.generation and story.resumed_at_step is None:
            story.resumed_at_step = int(found[1])
    elif found := STEP.search(line.text):
        step, last, world, generation = map(int, found.groups())
        follow_step(story, line, step, last, world, generation)
    elif found := DONE.search(line.text):
        story.accuracy = float(found[1])


def follow_step(story: Story, line: Line, step: int, last: int, world: int, generation: int) -> None:
    everyone = world == WORKERS
    if everyone and story.first_step_s is None:
        story.first_step_s = line.at_s
    if everyone and story.victim is None and step > last / 2:
        story.victim = victim = choose(story, generation)
        say(
            "demo",
            f"Now killing worker {victim.worker_id} (process {victim.pid}) with SIGKILL.",
        )
        story.killed_s, story.killed_after_step = time.monotonic(), step
        os.kill(victim.pid, signal.SIGKILL)
    elif story.victim and generation > story.victim.generation and everyone and story.recovered_s is None:
        story.recovered_s = line.at_s
        say("demo", f"Training resumed: {world} workers, {story.since_kill(line.at_s):.1f} s after the kill.")


def choose(story: Story, generation: int) -> Worker:
    """The second worker of the larger node, so that the first one and the other node survive."""
    for worker in story.workers.values():
        if worker.generation == generation and worker.node == "node-a" and worker.rank != 0:
            return worker
    raise DemoError(f"no worker of node-a has reported its start in generation {generation}")


def undisturbed_accuracy(folder: Path) -> float:
    alone = subprocess.run(
        [sys.executable, str(DIGITS), *script_arguments(folder / "undisturbed", step_time_s=0.0)],
        capture_output=True,
        text=True,
        timeout=LIMIT_S,
    )
    found = DONE.search(alone.stdout)
    if found is None:
        raise DemoError(f"the uninterrupted training failed:\n{alone.stdout}{alone.stderr}")
    return float(found[1])


def report(story: Story, undisturbed: float) -> None:
    if story.victim is None or story.first_step_s is None:
        raise DemoError(
            f"expected {WORKERS} workers to train together by the middle of training; they did not"
        )
    recovery_s = story.since_kill(story.recovered_s)
    meeting_s = story.since_kill(story.met_again_s)
    if story.resumed_at_step is None or not 0 < story.resumed_at_step <= story.killed_after_step + 1:
        raise DemoError(f"expected to resume from a checkpoint, but resumed at step {story.resumed_at_step}")
    if story.accuracy is None:
        raise DemoError("training did not report its accuracy")
    for text in (
        "",
        f"start     {WORKERS} workers completed their first step after {story.first_step_s - story.begin_s:.1f} s",
        f"fault     worker {story.victim.worker_id} killed after step {story.killed_after_step}",
        f"recovery  {recovery_s:.1f} s until all {WORKERS} workers completed the next step",
        f"          ({meeting_s:.1f} s of it until the new workers had started and joined the process group)",
        f"resumed   from the checkpoint of step {story.resumed_at_step}",
        f"accuracy  {story.accuracy:.1%}, uninterrupted {undisturbed:.1%}",
    ):
        say("demo", text)
    if abs(story.accuracy - undisturbed) > TOLERANCE:
        raise DemoError("the accuracy differs from that of the uninterrupted training")
    say("demo", "Training survived the loss of a worker, with the same result as uninterrupted training.")


def script_arguments(checkpoints: Path, step_time_s: float = STEP_TIME_S) -> list[str]:
    # Log lines fall between checkpoints, so that some steps are lost and the output shows the return to the checkpoint.
    every = ["--checkpoint-every", "40", "--log-every", "20"]
    return ["--checkpoint-dir", str(checkpoints), *every, "--step-time", str(step_time_s)]


def agent_command() -> list[str]:
    installed = Path(sys.executable).with_name("elastic-agent")
    return [str(installed)] if installed.exists() else [sys.executable, "-m", "elastic_agent"]


def say(who: str, text: str) -> None:
    prefix = f"[{who}]".ljust(8)
    if sys.stdout.isatty():
        prefix = f"\033[{COLOURS[who]}m{prefix}\033[0m"
    print(f"{prefix} {text}", flush=True)


if __name__ == "__main__":
    sys.exit(main())
