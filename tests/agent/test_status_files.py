"""The generations that the agents of a run record in a state directory, for those that resume it."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest
from msgspec.structs import replace

from elastic_agent.agent.reporting.status_files import StatusFiles, saved_statuses
from elastic_agent.monitoring.status import GenerationStatus, RunStatus
from tests.waiting import GUARD_S

EXPLAINED = GenerationStatus(1, 100.0, 160.0, ("n1", "n2"), 2, "n1 was lost", "root cause: …")


def record(state_dir: Path, node_id: str, *generations: GenerationStatus, phase: str = "running") -> None:
    async def saved() -> None:
        files = StatusFiles(state_dir, "run", node_id)
        files.save(RunStatus("run", "host0", 200.0, phase, generations=generations))
        await files.written(GUARD_S)

    asyncio.run(saved())


def recorded(state_dir: Path) -> tuple[GenerationStatus, ...]:
    return asyncio.run(StatusFiles(state_dir, "run", "n9").recorded())


@pytest.mark.parametrize("content", ['{"run_id"', "", '{"run_id": 7}', "[]", "\0\0", "[" * 10_000])
def test_an_agent_reads_the_newest_status_of_its_run_that_can_be_read(tmp_path: Path, content: str) -> None:
    record(tmp_path, "n1", replace(EXPLAINED, cause="older"))
    record(tmp_path, "n2", EXPLAINED)
    os.utime(tmp_path / "status" / "run" / "n1.json", (1.0, 1.0))
    (tmp_path / "status" / "run" / "n3.json").write_text(content)
    assert recorded(tmp_path) == (EXPLAINED,)


def test_nobody_determines_a_root_cause_any_more_when_the_agent_that_did_is_gone(tmp_path: Path) -> None:
    record(
        tmp_path, "n1", GenerationStatus(1, 100.0, 160.0, end="workers failed", failed=True, is_pending=True)
    )
    (row,), (status,) = recorded(tmp_path), saved_statuses(tmp_path)
    assert row.end_words == "workers failed; the root cause was not recorded"
    assert status.generations == (row,)


def test_the_generations_of_an_earlier_run_of_this_name_are_not_taken_for_the_runs(tmp_path: Path) -> None:
    record(tmp_path, "n1", EXPLAINED, phase="finished")
    assert recorded(tmp_path) == ()
