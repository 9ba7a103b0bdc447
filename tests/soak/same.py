"""Whether a disturbed run came to the states and losses of an undisturbed one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from elastic_agent.testing import LocalCluster
from elastic_agent.testing.course import Course
from elastic_agent.testing.processes import Line

from .cluster import SCRIPT

SHOWN = 3


def undisturbed(folder: Path, steps: int, timeout_s: float) -> tuple[dict[int, tuple[str, float]], Path]:
    """State and loss after each step of one worker without faults, and its last checkpoint."""
    checkpoints = folder / "checkpoints"
    checkpoints.mkdir(parents=True)
    (folder / "cluster").mkdir()
    words = [str(SCRIPT), str(checkpoints), "0", str(steps)]
    with LocalCluster(words, folder / "cluster", nodes=1) as cluster:
        cluster.start_all()
        codes = cluster.wait_end(timeout_s=timeout_s)
        assert set(codes.values()) == {0}, cluster.story()
        course = {line["taken"]: (line["state"], line["loss"]) for line in cluster.records("step")}
    return course, checkpoints / "model.pt"


def differences(records: list[Line], course: Course, wanted: dict[int, tuple[str, float]]) -> list[str]:
    """Steps that led elsewhere, and generations whose first state is none of the undisturbed run's."""
    found = [
        f"generation {number} began with a state that no step had led to"
        for number, generation in course.generations.items()
        if generation.is_under_way and generation.start is None
    ]
    for line in records:
        position = course.generations[line["generation"]].base + line["taken"]
        if wanted.get(position) != (line["state"], line["loss"]):
            found.append(
                f"step {position} in generation {line['generation']}: state {line['state']}, loss {line['loss']!r}; "
                f"undisturbed {wanted.get(position)}"
            )
    return found[:SHOWN]


def differing_tensors(one: Path, other: Path) -> list[str]:
    """Names of what differs between two checkpoints, in any bit."""
    first, second = (torch.load(path, weights_only=True) for path in (one, other))
    return _differing("", first, second)


def _differing(name: str, one: Any, other: Any) -> list[str]:
    if isinstance(one, dict):
        if one.keys() != other.keys():
            return [f"{name}: keys {sorted(map(str, one))}, {sorted(map(str, other))}"]
        return [found for key in one for found in _differing(f"{name}/{key}", one[key], other[key])]
    same = torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other
    return [] if same else [name]
