"""Is the root cause right when several workers fail within 50 ms of each other, and the first cause is drawn at random?

Three agents with two workers each, on machines of their own (network namespaces). In each run, a worker or a node
fails in a way that a seed draws. Further workers fail by an error of their own at drawn moments within the next 50 ms,
and all others because their collective breaks; some of these replace its error by one of their own. Every worker notes
the moment (CLOCK_BOOTTIME) before it fails, so the first cause is known. Right is a run in which the log of every
agent, and ``elastic-agent why`` on every machine, name the worker (or node), its machine and its error.

A run is one generation of a job; a job that has come to its end or is stuck is replaced.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure, Result
from benchmarks.options import Options, progress
from benchmarks.scene import boottime_s

from .stage import Stage, plain

SCRIPT = Path(__file__).with_name("scripts") / "failing_together.py"
NODES = ("a", "b", "c")
WORKERS = tuple(f"{node}/{slot}" for node in NODES for slot in range(2))
RUNS_OF_A_JOB = 10
LEAVE_S, LEAD_S = 0.15, 0.35
"""From the order until the workers that are to fail leave the loop, in which all others then wait for them, and until
the first failure."""
SPREAD_S = 0.05
MOST_OTHERS = 2
PATIENCE_S = 60.0
EXPLAINED_S = 20.0

NODE_LOST = "node lost"
HANG = "hang"
WORDS = {
    "exception": "ValueError: bad sample on {worker}",
    "chained exception": "label on {worker}|the data set cannot be read",
    "exception in a finally": "ValueError: bad sample on {worker}",
    "SIGKILL": "was killed by SIGKILL",
    "SIGSEGV": "was killed by SIGSEGV",
    "SIGABRT": "was killed by SIGABRT",
    "os._exit(3)": r"exited with code 3( \(on |$)",
    "sys.exit(3)": r"exited with code 3( \(on |$)",
    "sys.exit(message)": "no data on {worker}",
    "sys.exit(0)": "exited with code 0 while other workers",
    "os._exit(0)": "exited with code 0 while other workers",
    "out of memory": "can't allocate memory",
    "disk full": "No space left on device",
    "loader exception": "cannot identify image file of {worker}",
    "CUDA out of memory": "CUDA out of memory.* on {worker}",
    "CUDA error": "uncorrectable ECC error",
    "NCCL error": "NCCL error|Duplicate GPU detected",
    HANG: "did not take part|is one all_reduce behind",
}
"""What the first line of an explanation says of each kind (regular expressions)."""
FIRST = (*WORDS, NODE_LOST)
LATER = tuple(
    one for one in WORDS if one not in (HANG, "loader exception", "exception in a finally", "sys.exit(0)")
)
"""Of further workers that fail by themselves. The moment of the others is not that of the order."""
ALONE = (HANG, NODE_LOST, "sys.exit(0)", "exception in a finally", "loader exception")
"""Causes that no worker can know at the moment at which they happen: nothing else fails by itself meanwhile."""
REACTIONS = ("none", "chained", "another exception", "logs, sys.exit(1)", "os._exit(7)", "aborts")
RECOGNISABLE = REACTIONS[:2]
REPLACED_SHARE = 0.4
"""Of the workers whose collective breaks, so many replace its error."""
WITHOUT_AN_ERROR = (HANG, "sys.exit(0)", "os._exit(0)")
"""Causes that write nothing: an error by which another worker replaces that of its collective would hide them."""
CAUSE = re.compile(r"(?m)^.*generation (\d+): ((?:probable )?root cause: .*\n(?:  .*\n)*)")


@dataclass(frozen=True)
class Order:
    """What is to happen in one run."""

    kind: str
    victim: str
    """A worker, or a node."""
    later: dict[str, tuple[str, float]]
    """Further workers that fail: how, and how much later, in seconds."""
    reactions: dict[str, str]


@dataclass
class Outcome:
    """What happened in one run, and what was said of it."""

    order: Order
    first: str = ""
    """The kind that was first by the clock."""
    culprit: str = ""
    moments: list[dict[str, Any]] = field(default_factory=list)
    said: dict[str, str] = field(default_factory=dict)
    """By where it was read."""
    wrong: list[str] = field(default_factory=list)
    took_s: float = 0.0

    @property
    def is_right(self) -> bool:
        return bool(self.said) and not self.wrong

    @property
    def row(self) -> str:
        verdict = "right" if self.is_right else f"WRONG ({'; '.join(self.wrong)})"
        spread_ms = [1000 * (one["boottime_s"] - self.moments[0]["boottime_s"]) for one in self.moments]
        further = [
            f"{one['worker']} {one['kind']} +{late:.0f} ms"
            for one, late in zip(self.moments[1:], spread_ms[1:], strict=True)
        ]
        line = next(iter(self.said.values()), "nothing").partition("\n")[0]
        return f"{self.culprit} {self.first}; {', '.join(further) or 'no other'}: {verdict}: {line}"


class StuckError(Exception):
    """The job did not come to where a run can begin or end."""


def run(options: Options) -> Result:
    if os.geteuid() != 0:
        return Result("causes", [], ["not measured: network namespaces require root"])
    outcomes: list[Outcome] = []
    with tempfile.TemporaryDirectory(prefix="elastic-agent-causes-") as folder:
        while len(outcomes) < options.times:
            job = Path(folder) / str(len(outcomes))
            job.mkdir()
            count = min(RUNS_OF_A_JOB, options.times - len(outcomes))
            seeds = range(options.seed + len(outcomes), options.seed + len(outcomes) + count)
            for outcome in _job(job, list(seeds)):
                outcomes.append(outcome)
                progress(f"{len(outcomes)} ({outcome.took_s:.1f} s): {outcome.row}")
    right = sum(one.is_right for one in outcomes)
    probable = sum(any(line.startswith("probable") for line in one.said.values()) for one in outcomes)
    took = Figure("a run, with its restart", "elastic-agent", "s", samples=[one.took_s for one in outcomes])
    summary = f"right in {right} of {len(outcomes)} runs; called probable in {probable}"
    wrong = [one.row for one in outcomes if not one.is_right]
    return Result("causes", [took], [summary, *wrong], tables={"causes": [asdict(one) for one in outcomes]})


def draw(seed: int) -> Order:
    """The order of one run."""
    rng = random.Random(seed)
    kind = rng.choice(FIRST)
    victim = rng.choice(NODES[1:]) if kind == NODE_LOST else rng.choice(WORKERS)
    rest = [one for one in WORKERS if not one.startswith(victim)]
    rng.shuffle(rest)
    count = 0 if kind in ALONE else rng.randint(0, MOST_OTHERS)
    later = {one: (rng.choice(LATER), rng.uniform(0.0, SPREAD_S)) for one in rest[:count]}
    known = RECOGNISABLE if kind in WITHOUT_AN_ERROR else REACTIONS
    reactions = {one: rng.choice(known) if rng.random() < REPLACED_SHARE else "none" for one in rest[count:]}
    return Order(kind, victim, later, reactions)


def _job(folder: Path, seeds: list[int]) -> Iterator[Outcome]:
    options = ("--max-restarts", "1000", "--restart-backoff", "0")
    with Stage(folder, NODES, options=options) as stage:
        (folder / "small").mkdir()
        for node in NODES:
            _start(stage, node)
        generation = 0
        for seed in seeds:
            began_s = time.monotonic()
            outcome = Outcome(draw(seed))
            try:
                generation = _begin(stage, generation)
                _play(stage, generation, outcome)
            except (AssertionError, StuckError) as error:
                outcome.wrong.append(f"stuck: {str(error).splitlines()[0]}")
            outcome.took_s = time.monotonic() - began_s
            yield outcome
            if outcome.wrong and outcome.wrong[-1].startswith("stuck"):
                (folder.parent / f"stuck-{seed}.txt").write_text(stage.cluster.story())
                return


def _start(stage: Stage, node: str) -> None:
    setup = f"mount -t tmpfs -o size=64k tmpfs {stage.folder}/small"
    stage.start(node, slots=2, script=SCRIPT, setup=setup, CAUSES_FOLDER=str(stage.folder))


def _notes(stage: Stage) -> list[dict[str, Any]]:
    with suppress(FileNotFoundError):
        lines = (stage.folder / "moments.jsonl").read_bytes().splitlines()
        return [json.loads(line) for line in lines]
    return []


def _begin(stage: Stage, after: int) -> int:
    """Wait until all six workers of a later generation train; which one."""

    def look() -> int | None:
        steady = [one for one in _notes(stage) if one["kind"] == "training" and one["generation"] > after]
        newest = max((one["generation"] for one in steady), default=0)
        return newest if len({one["worker"] for one in steady if one["generation"] == newest}) == 6 else None

    return stage.cluster.wait("six workers that train", look, PATIENCE_S)


def _play(stage: Stage, generation: int, outcome: Outcome) -> None:
    order = outcome.order
    now_s = boottime_s()
    at_s = now_s + LEAD_S
    acts = {worker: (kind, at_s + delay_s) for worker, (kind, delay_s) in order.later.items()}
    if order.kind != NODE_LOST:
        acts[order.victim] = (order.kind, at_s)
    draft = stage.folder / ".order"
    draft.write_text(json.dumps({"leave_s": now_s + LEAVE_S, "acts": acts, "reactions": order.reactions}))
    draft.rename(stage.folder / f"order.{generation}.json")
    lost: list[dict[str, Any]] = []
    if order.kind == NODE_LOST:
        lost.append(_kill_node(stage, order.victim, at_s))
    said = _explanations(stage, generation, [one for one in NODES if not lost or one != order.victim])
    notes = [one for one in _notes(stage) if one["generation"] == generation and one["kind"] != "training"]
    outcome.moments = sorted((*notes, *lost), key=lambda one: float(one["boottime_s"]))
    outcome.first, outcome.culprit = outcome.moments[0]["kind"], outcome.moments[0]["worker"]
    outcome.said = said
    rank = outcome.moments[0].get("rank")
    outcome.wrong = [where for where, text in said.items() if not _is_right(outcome, rank, text)]
    if lost:
        _start(stage, order.victim)


def _kill_node(stage: Stage, node: str, at_s: float) -> dict[str, Any]:
    agent = stage.cluster.agents[node]
    pids = agent.pid, agent.guard
    time.sleep(max(0.0, at_s - boottime_s()))
    now_s = boottime_s()
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    return {"kind": NODE_LOST, "worker": node, "boottime_s": now_s}


def _explanations(stage: Stage, generation: int, nodes: list[str]) -> dict[str, str]:
    """What the logs say, and ``elastic-agent why``, by node."""

    def look() -> dict[str, str] | None:
        found = {}
        for node in nodes:
            causes = {int(one[1]): one[2] for one in CAUSE.finditer(plain(stage.cluster.agents[node].said()))}
            if generation in causes:
                found[f"log of {node}"] = causes[generation]
        return found if len(found) == len(nodes) else None

    logs = stage.cluster.wait(f"explanations of generation {generation}", look, EXPLAINED_S)
    return {**logs, **{f"why on {node}": _why(stage, generation, node) for node in nodes}}


def _why(stage: Stage, generation: int, node: str) -> str:
    command = [*stage.machines.within(node), sys.executable, "-m", "elastic_agent", "why", "job"]
    done = subprocess.run(
        [*command, "--generation", str(generation)], capture_output=True, text=True, check=False
    )
    found = CAUSE.search(f"{done.stdout}\n")
    return found[2] if found is not None else f"nothing: {done.stdout}{done.stderr}"


def _is_right(outcome: Outcome, rank: int | None, text: str) -> bool:
    """Whether the explanation names the worker or node, its machine, and what happened to it."""
    line = text.partition("\n")[0]
    node = outcome.culprit.partition("/")[0]
    if outcome.first == NODE_LOST:
        machine = re.escape(f"10.213.77.{NODES.index(node) + 1}")
        return re.search(rf"node {node} (was lost|stopped reporting) \({machine}\)", line) is not None
    what = WORDS[outcome.first].format(worker=outcome.culprit)
    worker = re.escape(f"worker {outcome.culprit} (rank {rank}) on host-{node}")
    return re.search(rf"root cause: {worker}.*(?:{what})", line) is not None
