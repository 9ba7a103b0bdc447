"""The ways to start a worker that are compared: bare Python and the agent's own ways.

An agent imports torch for itself. What needs no agent is run by its guard alone, so that a launch costs less.

Each runs the same job and tells, for every worker of every attempt, how it ended and what it wrote.
"""

from __future__ import annotations

import ast
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from elastic_agent.workers.guard.client import Launch
from tests.cli.support import COMMAND, clean_environment
from tests.names import unique
from tests.workers.support import StandIn

SCRIPTS = Path(__file__).parent / "scripts"
PATIENCE_S = 500.0
"""A guard against hangs. Tests wait for launches in threads, which the time-out of a test does not reach."""

Argument = str | bytes


@dataclass(frozen=True)
class Job:
    """A script, its arguments, and how many workers run it how often."""

    script: str
    args: tuple[Argument, ...] = ()
    module: bool = False
    slots: int = 1
    restarts: int = 0
    """How often the workers are restarted when one of them fails."""
    terminal: bool = False
    """Whether the three standard streams are a terminal; else stdin is empty and the others go to files."""
    cwd: Path = SCRIPTS
    variables: Mapping[str, str] = field(default_factory=dict)
    commands: Sequence[Sequence[Argument]] = ()
    """Other commands for each slot; agents have the same for all."""

    @property
    def command(self) -> list[Argument]:
        """Return what comes after the launcher's own options."""
        return [*(["-m"] if self.module else []), self.script, *self.args]

    def command_of(self, slot: int) -> list[Argument]:
        """Return what Python is to run in this slot."""
        return [*self.commands[slot]] if self.commands else self.command

    def environment(self, more: Mapping[str, str] | None = None) -> dict[str, str]:
        inherited = clean_environment()
        inherited.pop("OMP_NUM_THREADS", None)
        return {**inherited, **(more or {}), **self.variables}


@dataclass(frozen=True)
class Worker:
    """How one worker ended. A negative code is the signal that killed it."""

    code: int
    stdout: bytes
    stderr: bytes


@dataclass(frozen=True)
class Outcome:
    """What became of a job."""

    workers: dict[tuple[int, int], Worker]
    """By attempt and slot, both from 0."""
    said: str
    """What the launcher itself wrote."""

    def worker(self, attempt: int, slot: int) -> Worker:
        assert (attempt, slot) in self.workers, f"no worker ran as {attempt, slot}; {self.said}"
        return self.workers[attempt, slot]


class BarePython:
    """The reference: ``python -u`` itself, with the variables that every launcher gives."""

    name = "python"

    def run(self, job: Job, folder: Path) -> Outcome:
        workers: dict[tuple[int, int], Worker] = {}
        for attempt in range(job.restarts + 1):
            now = self._attempt(job, folder, attempt)
            workers.update({(attempt, slot): worker for slot, worker in now.items()})
            if not any(worker.code for worker in now.values()):
                break
        return Outcome(workers, "")

    def _attempt(self, job: Job, folder: Path, attempt: int) -> dict[int, Worker]:
        with ThreadPoolExecutor(2) as pool:
            slots = range(job.slots)
            return dict(
                zip(slots, pool.map(lambda slot: self._one(job, folder, attempt, slot), slots), strict=True)
            )

    def _one(self, job: Job, folder: Path, attempt: int, slot: int) -> Worker:
        at = folder / f"{attempt}-{slot}"
        at.mkdir()
        out, err = at / "stdout.log", at / "stderr.log"
        with out.open("ab") as to_out, err.open("ab") as to_err:
            code = _run(
                [sys.executable, "-u", *job.command_of(slot)],
                job,
                _stand_ins(job, attempt, slot),
                to_out.fileno(),
                to_err.fileno(),
            )
        return Worker(code, out.read_bytes(), err.read_bytes())


@dataclass(frozen=True)
class Agent:
    """``elastic-agent``, which starts its workers cold or warm."""

    name: str
    """How it starts them."""

    def run(self, job: Job, folder: Path) -> Outcome:
        run_id = unique("conformance")
        own = [
            *("--standalone", "--nproc-per-node", str(job.slots), "--max-restarts", str(job.restarts)),
            *("--restart-window", "0.001"),  # as with torchrun, attempts follow each other at once
            *("--redirects", "0" if job.terminal else "3", "--log-dir", str(folder / "logs")),
            *("--state-dir", str(folder / "state"), "--event-journal", str(folder / "journal")),
            *("--rdzv-id", run_id, "--node-id", "here", "--shutdown-timeout", "60", "--lease-ttl", "60"),
            *("--worker-start", self.name),
            *("--start-timeout", "600"),  # never cold because the machine is busy
        ]
        said = _run_and_read([*COMMAND, *own, *job.command], job, folder)
        assert (folder / "journal").exists(), said
        events = [json.loads(line) for line in (folder / "journal").read_text().splitlines()]
        codes = {
            (event["generation"] - 1, event["slot"]): event["returncode"]
            for event in events
            if event["event"] == "worker_exited"
        }
        workers = {}
        for (attempt, slot), code in codes.items():
            at = folder / "logs" / run_id / f"{attempt + 1:06}" / "here" / str(slot)
            workers[attempt, slot] = Worker(code, _content(at / "stdout.log"), _content(at / "stderr.log"))
        return Outcome(workers, said)


class GuardedWarm:
    """The agent's guard, which starts workers warm as for an agent, and no agent."""

    name = "guarded-warm"

    def run(self, job: Job, folder: Path) -> Outcome:
        said = folder / "said.log"
        with said.open("ab") as file:
            surroundings = {"cwd": job.cwd, "env": job.environment()}
            agent = StandIn(file.fileno(), PATIENCE_S, stderr=file.fileno(), **surroundings)
        workers: dict[tuple[int, int], Worker] = {}
        try:
            agent.do("keep_warm", script=job.script, module=job.module, slots=job.slots)
            for attempt in range(job.restarts + 1):
                now = self._attempt(agent, job, folder, attempt)
                workers.update({(attempt, slot): worker for slot, worker in now.items()})
                if not any(worker.code for worker in now.values()):
                    break
            expected = {"standin", "Ready", "Warm", "Spawned", "Exited", "Stopped"}
            assert {event["name"] for event in agent.events} == expected, agent.events
        finally:
            agent.close()
        return Outcome(workers, said.read_text(errors="replace"))

    def _attempt(self, agent: StandIn, job: Job, folder: Path, attempt: int) -> dict[int, Worker]:
        launches = [
            Launch(
                slot,
                tuple(os.fsdecode(part) for part in (sys.executable, "-u", *job.command_of(slot))),
                job.environment(_stand_ins(job, attempt, slot)),
                **{stream: str(folder / f"{stream}-{attempt}-{slot}") for stream in ("stdout", "stderr")},
                warm=True,
            )
            for slot in range(job.slots)
        ]
        agent.start(*launches, generation=attempt + 1)
        ends = [agent.until("Exited") for _ in launches]
        agent.stop(PATIENCE_S)
        codes = {end["slot"]: end["returncode"] for end in ends}
        files = ((launch.slot, Path(str(launch.stdout)), Path(str(launch.stderr))) for launch in launches)
        return {slot: Worker(codes[slot], out.read_bytes(), err.read_bytes()) for slot, out, err in files}


Launcher = BarePython | Agent | GuardedWarm

BARE = BarePython()
COLD, WARM = Agent("cold"), Agent("warm")
GUARDED_WARM = GuardedWarm()
LAUNCHERS: list[Launcher] = [COLD, WARM]
"""Those compared with bare Python."""


def launchers(*tested: Launcher) -> pytest.MarkDecorator:
    """Parametrize a test: `make test` runs it under these launchers, `make prove` under the agent's own as well."""
    more = [launcher for launcher in LAUNCHERS if launcher not in tested]
    parameters = [*tested, *(pytest.param(launcher, marks=pytest.mark.prove) for launcher in more)]
    return pytest.mark.parametrize("launcher", parameters, ids=lambda launcher: launcher.name)


def functions_of(path: Path, decorator: str) -> list[str]:
    """The names of the functions of a script that carry this decorator, in order; it is not run."""
    return [
        node.name
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == decorator for mark in node.decorator_list)
    ]


def run_everywhere(
    job: Job, folder: Path, launchers: Sequence[Launcher] = (BARE, *LAUNCHERS)
) -> dict[str, Outcome]:
    """The job under bare Python and under the launchers, two at a time; outcomes by launcher's name.

    CONFORMANCE_FOLDER names the workers a folder for themselves, the launcher's name within ``folder``.
    """

    def run(launcher: Launcher) -> Outcome:
        own = folder / launcher.name
        own.mkdir()
        os.mkfifo(own / "gate")
        variables = {**job.variables, "CONFORMANCE_FOLDER": str(own)}
        return launcher.run(dataclasses.replace(job, variables=variables), own)

    with ThreadPoolExecutor(2) as pool:
        pending = {launcher.name: pool.submit(run, launcher) for launcher in launchers}
        return {name: outcome.result() for name, outcome in pending.items()}


def _stand_ins(job: Job, attempt: int, slot: int) -> dict[str, str]:
    """For bare Python: what the launchers set and a script, or torch, goes by."""
    env = {
        "RANK": str(slot),
        "LOCAL_RANK": str(slot),
        "WORLD_SIZE": str(job.slots),
        "LOCAL_WORLD_SIZE": str(job.slots),
        "TORCHELASTIC_RESTART_COUNT": str(attempt),
        "TORCHELASTIC_RUN_ID": "bare",
        "TORCH_NCCL_ASYNC_ERROR_HANDLING": "1",
    }
    if job.slots > 1 and "OMP_NUM_THREADS" not in job.variables:
        env["OMP_NUM_THREADS"] = "1"
    return env


def _content(path: Path) -> bytes:
    return path.read_bytes() if path.exists() else b""


def _run_and_read(command: list[Argument], job: Job, folder: Path) -> str:
    said = folder / "said.log"
    with said.open("ab") as file:
        _run(command, job, {}, file.fileno(), file.fileno())
    return said.read_text(errors="replace")


def _run(command: list[Argument], job: Job, more: Mapping[str, str], out: int, err: int) -> int:
    with _terminal_copied_to(out) if job.terminal else contextlib.nullcontext() as terminal:
        process = subprocess.Popen(
            command,
            cwd=job.cwd,
            env=job.environment(more),
            stdin=subprocess.DEVNULL if terminal is None else terminal,
            stdout=out if terminal is None else terminal,
            stderr=err if terminal is None else terminal,
            start_new_session=True,
        )
        with _ended_whatever_happens(process):
            return process.wait(PATIENCE_S)


@contextlib.contextmanager
def _terminal_copied_to(file: int) -> Iterator[int]:
    ours, theirs = os.openpty()

    def copy() -> None:
        with contextlib.suppress(OSError):  # the other end is closed
            while shown := os.read(ours, 1 << 16):
                os.write(file, shown)

    reader = threading.Thread(target=copy)
    reader.start()
    try:
        yield theirs
    finally:
        os.close(theirs)
        reader.join()
        os.close(ours)


@contextlib.contextmanager
def _ended_whatever_happens(process: subprocess.Popen[bytes]) -> Iterator[None]:
    try:
        yield
    finally:
        for signum in (signal.SIGTERM, signal.SIGKILL):  # a launcher that is asked ends its workers too
            if process.poll() is None:
                os.killpg(process.pid, signum)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(10)
