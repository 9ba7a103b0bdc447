"""Is the root cause right when several workers fail within 50 ms of each other, and the first cause is drawn at random?

Three agents with two workers each, on machines of their own (network namespaces). In each run, a worker or a node
fails in a way that a seed draws. Further workers fail by an error of their own at drawn moments within the next 50 ms,
and all others because their collective breaks; some of these replace its error by one of their own. Every worker notes
the moment (CLOCK_BOOTTIME) before it fails, so the first cause is known. Right is a run in which the log of every
agent, and ``elastic-agent why`` on every machine, name the worker (or node), its machine and its error.

A run is one generation of a job. `make evaluate` makes RUNS=10 of them with SEED=1 and the next ones, as root.
"""

from __future__ import annotations

import json
import os
import random
import re
import signal
import subprocess
import sys
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.linux import boottime_s
from elastic_agent.testing.processes import Lines

from .stage import Stage, plain, staged

pytestmark = [pytest.mark.system, pytest.mark.prove]

SCRIPT = Path(__file__).with_name("scripts") / "failing_together.py"
NODES = ("a", "b", "c")
WORKERS = tuple(f"{node}/{slot}" for node in NODES for slot in range(2))
RUNS, SEED = (int(os.environ.get(name, default)) for name, default in (("RUNS", "10"), ("SEED", "1")))
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
    kind for kind in WORDS if kind not in (HANG, "loader exception", "exception in a finally", "sys.exit(0)")
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
WITHOUT_A_NOTE = ("SIGKILL", "SIGSEGV", "SIGABRT", "os._exit(3)", "os._exit(0)")
"""Causes that no exit note dates: a failure some tens of milliseconds later may be taken for the first."""
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

    moments: list[dict[str, Any]]
    said: dict[str, str]
    """By where it was read."""
    wrong: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.moments.sort(key=lambda moment: float(moment["boottime_s"]))
        causes = self.moments if self.moments[0]["kind"] in WITHOUT_A_NOTE else self.moments[:1]
        self.wrong = [
            where for where, text in self.said.items() if not any(_names(text, cause) for cause in causes)
        ]

    @property
    def row(self) -> str:
        verdict = "right" if not self.wrong else f"WRONG ({'; '.join(self.wrong)})"
        first = self.moments[0]
        further = [
            f"{moment['worker']} {moment['kind']} +{1000 * (moment['boottime_s'] - first['boottime_s']):.0f} ms"
            for moment in self.moments[1:]
        ]
        line = next(iter(self.said.values()), "nothing").partition("\n")[0]
        return f"{first['worker']} {first['kind']}; {', '.join(further) or 'no other'}: {verdict}: {line}"


def _names(text: str, moment: dict[str, Any]) -> bool:
    """Whether the explanation names the worker or node, its machine, and what happened to it."""
    line = text.partition("\n")[0]
    kind, culprit = moment["kind"], moment["worker"]
    node = culprit.partition("/")[0]
    if kind == NODE_LOST:
        machine = re.escape(f"10.213.77.{NODES.index(node) + 1}")
        return re.search(rf"node {node} (was lost|stopped reporting) \({machine}\)", line) is not None
    what = WORDS[kind].format(worker=culprit)
    worker = re.escape(f"worker {culprit} (rank {moment['rank']}) on host-{node}")
    return re.search(rf"root cause: {worker}.*(?:{what})", line) is not None


@pytest.mark.skipif(os.environ.get("EVALUATE") != "all", reason="`make evaluate` does this")
@pytest.mark.parametrize("first_seed", range(SEED, SEED + RUNS, RUNS_OF_A_JOB))
def test_the_first_of_several_failures_within_50_ms_is_the_root_cause(
    first_seed: int, tmp_path: Path
) -> None:
    outcomes: list[Outcome] = []
    (tmp_path / "small").mkdir()
    with staged(tmp_path, NODES, options=("--max-restarts", "1000", "--restart-window", "0.001")) as stage:
        for node in NODES:
            _start(stage, node)
        generation = 0
        for seed in range(first_seed, min(first_seed + RUNS_OF_A_JOB, SEED + RUNS)):
            generation = _begin(stage, generation)
            outcomes.append(_play(stage, generation, draw(seed)))
            print(f"seed {seed}: {outcomes[-1].row}", flush=True)
    wrong = [outcome.row for outcome in outcomes if outcome.wrong]
    assert not wrong, "\n".join(wrong)


def draw(seed: int) -> Order:
    """The order of one run."""
    rng = random.Random(seed)
    kind = rng.choice(FIRST)
    victim = rng.choice(NODES[1:]) if kind == NODE_LOST else rng.choice(WORKERS)
    rest = [worker for worker in WORKERS if not worker.startswith(victim)]
    rng.shuffle(rest)
    count = 0 if kind in ALONE else rng.randint(0, MOST_OTHERS)
    later = {worker: (rng.choice(LATER), rng.uniform(0.0, SPREAD_S)) for worker in rest[:count]}
    known = RECOGNISABLE if kind in WITHOUT_AN_ERROR else REACTIONS
    reactions = {
        worker: rng.choice(known) if rng.random() < REPLACED_SHARE else "none" for worker in rest[count:]
    }
    return Order(kind, victim, later, reactions)


def _start(stage: Stage, node: str) -> None:
    setup = f"mount -t tmpfs -o size=64k tmpfs {stage.folder}/small"
    stage.start(node, slots=2, script=SCRIPT, setup=setup, CAUSES_FOLDER=str(stage.folder))


def _begin(stage: Stage, after: int) -> int:
    """Wait until all six workers of a later generation train; which one."""

    moments = Lines(stage.folder / "moments.jsonl")

    def look() -> int | None:
        training: dict[int, set[str]] = {}
        for note in moments.of("training"):
            if note["generation"] > after:
                training.setdefault(note["generation"], set()).add(note["worker"])
        newest = max(training, default=0)
        return newest if newest and len(training[newest]) == len(WORKERS) else None

    return stage.cluster.wait("six workers that train", look, PATIENCE_S)


def _play(stage: Stage, generation: int, order: Order) -> Outcome:
    now_s = boottime_s()
    at_s = now_s + LEAD_S
    acts = {worker: (kind, at_s + delay_s) for worker, (kind, delay_s) in order.later.items()}
    if order.kind != NODE_LOST:
        acts[order.victim] = (order.kind, at_s)
    draft = stage.folder / ".order"
    draft.write_text(json.dumps({"leave_s": now_s + LEAVE_S, "acts": acts, "reactions": order.reactions}))
    draft.rename(stage.folder / f"order.{generation}.json")
    lost = [_kill_node(stage, order.victim, at_s)] if order.kind == NODE_LOST else []
    said = _explanations(stage, generation, [node for node in NODES if not lost or node != order.victim])
    moments = Lines(stage.folder / "moments.jsonl").all()
    notes = [note for note in moments if note["generation"] == generation and note["kind"] != "training"]
    if lost:
        _start(stage, order.victim)
    return Outcome([*notes, *lost], said)


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
            causes = {
                int(match[1]): match[2] for match in CAUSE.finditer(plain(stage.cluster.agents[node].said()))
            }
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
