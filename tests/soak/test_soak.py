"""What the soak test relies on: a script whose result depends on no fault, and checks that can fail."""

from __future__ import annotations

import os
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from elastic_agent.testing import LocalCluster
from elastic_agent.testing.course import Course
from elastic_agent.testing.processes import Line

from .cluster import SCRIPT
from .counts import MIB, Agent, Counts, exceeding
from .report import memory_problem
from .same import differences, differing_tensors, undisturbed
from .soak import PACE_S

STEPS = 25


@pytest.mark.system
@pytest.mark.prove
def test_the_result_of_the_script_depends_neither_on_the_workers_nor_on_a_fault(tmp_path: Path) -> None:
    wanted, checkpoint = undisturbed(tmp_path / "undisturbed", STEPS, 90)
    (tmp_path / "cluster").mkdir()
    (tmp_path / "checkpoints").mkdir()
    words = [str(SCRIPT), str(tmp_path / "checkpoints"), str(PACE_S), str(STEPS)]
    with LocalCluster(words, tmp_path / "cluster", nodes=1, nproc_per_node=3) as cluster:
        cluster.start_all()
        cluster.wait("a step after a checkpoint", lambda: cluster.course.position > 12 or None)
        os.kill(cluster.workers()["node-a/1"], signal.SIGKILL)
        assert cluster.wait_end() == {"node-a": 0}, cluster.story()
        assert len(cluster.course.generations) == 2, cluster.story()
        assert differences(cluster.records("step"), cluster.course, wanted) == []
    assert differing_tensors(tmp_path / "checkpoints/model.pt", checkpoint) == []


def step(generation: int, taken: int, state: str) -> Line:
    return {
        "kind": "step",
        "boottime_s": 10.0 * generation + taken,
        "node": "node-a",
        "rank": 0,
        "generation": generation,
        "taken": taken,
        "state": state,
        "loss": 0.5,
    }


def begin(generation: int, state: str) -> Line:
    return {**step(generation, 0, state), "kind": "begin"}


WANTED = {1: ("one", 0.5), 2: ("two", 0.5), 3: ("three", 0.5)}
LOADED = {**step(2, 0, ""), "kind": "load", "path": "model.pt", "error": None}
FIRST = [begin(1, "none"), step(1, 1, "one"), step(1, 2, "two")]


def found(lines: list[Line]) -> list[str]:
    course = Course()
    for line in lines:
        course.feed(line)
    return differences([line for line in lines if line["kind"] == "step"], course, WANTED)


def test_a_course_that_repeats_steps_from_a_checkpoint_is_the_same() -> None:
    assert found([*FIRST, LOADED, begin(2, "one"), step(2, 1, "two"), step(2, 2, "three")]) == []


@pytest.mark.parametrize(
    ("lines", "problem"),
    [
        ([*FIRST, LOADED, begin(2, "two"), step(2, 1, "other")], "step 3 in generation 2: state other"),
        ([*FIRST, LOADED, begin(2, "two"), {**step(2, 1, "three"), "loss": 0.5000001}], "loss 0.5000001"),
        ([*FIRST, LOADED, begin(2, "foreign")], "generation 2 began with a state that no step had led to"),
    ],
)
def test_a_course_that_differs_is_found(lines: list[Line], problem: str) -> None:
    assert problem in "\n".join(found(lines))


def test_a_checkpoint_that_differs_in_one_bit_is_found(tmp_path: Path) -> None:
    weights = torch.linspace(0, 1, 5, dtype=torch.float64)
    other = weights.clone()
    other[3] = torch.nextafter(other[3], torch.tensor(2.0, dtype=torch.float64))
    for name, values in (("one", weights), ("other", other)):
        torch.save({"model": {"weight": values}, "step": 3}, tmp_path / name)
    assert differing_tensors(tmp_path / "one", tmp_path / "one") == []
    assert differing_tensors(tmp_path / "one", tmp_path / "other") == ["/model/weight"]


def test_what_there_is_more_of_is_found() -> None:
    before = Counts(processes=12, descriptors=90, threads=30, files=["a"], keys=["k"])
    assert exceeding(before, replace(before, descriptors=80)) == []
    assert exceeding(before, replace(before, threads=33)) == []
    more = replace(before, threads=34, keys=["k", *"0123"])
    assert exceeding(before, more) == ["threads 30 -> 34", "keys 1 -> 5 0 1 2 3"]


def test_growing_memory_is_found() -> None:
    def agent(minute: int, per_minute: int) -> Agent:
        return Agent(1, 60.0 * minute, 160 * MIB + minute * per_minute, 30, 12)

    assert memory_problem([agent(minute, 0) for minute in range(60)]) is None
    grown = memory_problem([agent(minute, MIB // 10) for minute in range(60)])
    assert grown is not None
    assert "grew from 163.7 to 165.2 MiB" in grown
