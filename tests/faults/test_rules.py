"""The rules that the fault tests rely on do notice what they are for."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .cluster import Cluster
from .rules import check_safety

Line = dict[str, Any]

WORLD = [["a", "life-a", 1, 0], ["b", "life-b", 1, 1]]


def step(at_s: float, node: str, generation: int, number: int, **changes: object) -> Line:
    rank = "ab".index(node)
    return {
        "kind": "step",
        "boottime_s": at_s,
        "step": number,
        "run_id": "job",
        "node_id": node,
        "worker_id": f"{node}/0",
        "generation": generation,
        "rank": rank,
        "local_rank": 0,
        "node_rank": rank,
        "world_size": 2,
        "restarts": 0,
        "pid": 10 * generation + rank,
        **changes,
    }


def event(at_s: float, name: str, node: str, generation: int, **details: object) -> Line:
    return {"boottime_s": at_s, "event": name, "node": node, "generation": generation, **details}


def plan(at_s: float, node: str, generation: int, world: object = WORLD) -> Line:
    return event(at_s, "plan", node, generation, phase="running", charged=0, world=world)


def good_steps() -> list[Line]:
    """Two generations of two nodes; the step under way at the failure is taken again."""
    taken = [(1.0, 1, 1), (2.0, 1, 2), (5.0, 2, 2), (6.0, 2, 3)]
    steps = [step(at_s, node, generation, number) for at_s, generation, number in taken for node in "ab"]
    return [
        {**step(at_s, node, generation, 0), "kind": "born"}
        for at_s, generation in ((0.9, 1), (4.9, 2))
        for node in "ab"
    ] + steps


def good_events() -> list[Line]:
    lines = []
    for at_s, generation in ((0.5, 1), (4.0, 2)):
        for node in "ab":
            lines.append(plan(at_s, node, generation))
            lines.append(event(at_s + 0.1, "workers_started", node, generation))
    lines.append(event(3.1, "worker_exited", "a", 1, slot=0, exited_boottime_s=3.0))
    return lines


def judged(folder: Path, steps: list[Line], events: list[Line]) -> None:
    for name, lines in (("steps", steps), ("journal", events)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    check_safety(Cluster(folder, "2", port=1))


def test_a_correct_run_passes_the_rules(tmp_path: Path) -> None:
    judged(tmp_path, good_steps(), good_events())


@pytest.mark.parametrize(
    ("steps", "events", "complaint"),
    [
        ([], [plan(0.6, "b", 1, [*reversed(WORLD)])], "rule 1: generation 1 has several worlds"),
        ([step(4.5, "b", 1, 2)], [], "rule 2: b/0 took step 2 in generation 1, 0.400 s after a had started"),
        (
            [],
            [event(5.0, "worker_exited", "b", 1, slot=0, exited_boottime_s=4.2)],
            "rule 2: worker b/0 ended",
        ),
        ([], [plan(7.0, "a", 3, [["a", "life-a", 1, 0]])], "rule 3: generation 3 has 1 nodes, not 2"),
        (
            [],
            [plan(7.0, "a", 3, [["a", "x", 1, 0], ["b", "y", 1, 2]])],
            "rule 3: b has first rank 2 in generation 3",
        ),
        (
            [{**step(5.0, "b", 2, 0, rank=0), "kind": "born"}],
            [],
            "rule 3: node rank, rank, world size should be (1, 1, ",
        ),
        ([], [event(7.0, "workers_started", "a", 2)], "rule 4: a started generation 2 after 2"),
        ([step(4.95, "a", 2, 1)], [], "generation 2 began at step 1, the one before reached 2"),
        ([step(7.0, "a", 2, 5)], [], "generation 2 left out steps"),
        ([{**step(5.0, "b", 2, 0, run_id="other"), "kind": "born"}], [], "the run id changed"),
    ],
)
def test_a_violated_rule_is_detected(
    tmp_path: Path, steps: list[Line], events: list[Line], complaint: str
) -> None:
    with pytest.raises(AssertionError) as failure:
        judged(tmp_path, good_steps() + steps, good_events() + events)
    assert complaint in str(failure.value)
