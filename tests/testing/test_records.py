"""Files of JSON lines that several processes write are read while they grow."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_agent.testing.processes import Lines


def line(at_s: float, kind: str = "step") -> str:
    return json.dumps({"boottime_s": at_s, "kind": kind}) + "\n"


def append(path: Path, text: str) -> None:
    with path.open("a") as file:
        file.write(text)


def test_lines_are_sorted_by_time_and_read_when_they_are_complete(tmp_path: Path) -> None:
    path = tmp_path / "records.jsonl"
    lines = Lines(path, strict=True)
    assert lines.all() == []
    late = line(3.0)
    append(path, line(2.0) + line(1.0, "born") + late[:10])
    assert [line["boottime_s"] for line in lines.all()] == [1.0, 2.0]
    append(path, late[10:])
    assert [line["boottime_s"] for line in lines.all()] == [1.0, 2.0, 3.0]
    assert [line["boottime_s"] for line in lines.of("step")] == [2.0, 3.0]
    assert [line["boottime_s"] for line in lines.arrived(1)] == [1.0, 3.0]


@pytest.mark.parametrize("torn", [line(1.0)[:10] + line(2.0), "[1]\n", "{}\n", "\n"])
def test_a_torn_line_is_skipped_or_refused(tmp_path: Path, torn: str) -> None:
    path = tmp_path / "records.jsonl"
    append(path, line(0.0) + torn + line(3.0))
    assert [line["boottime_s"] for line in Lines(path).all()] == [0.0, 3.0]
    with pytest.raises(ValueError, match=r"records\.jsonl has a line that is torn or damaged"):
        Lines(path, strict=True).all()
