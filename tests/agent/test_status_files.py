"""The generations that the agents of a run record in a state directory, for those that resume it."""

from __future__ import annotations

import asyncio
from pathlib import Path

from elastic_agent.agent.reporting.status_files import READ_FILES, StatusFiles, saved_statuses
from elastic_agent.monitoring.status import GenerationStatus, RunStatus
from tests.waiting import GUARD_S

NOT_RECORDED = GenerationStatus(1, 100.0, None, ("n1", "n2"), 2, "not recorded", "not recorded")
RUNS = GenerationStatus(1, 100.0, nodes=("n1", "n2"), workers=2)
ENDED = GenerationStatus(1, 100.0, 160.0, ("n1", "n2"), 2, "n1 did not renew its lease", failed=True)
EXPLAINED = GenerationStatus(1, 100.0, 160.0, ("n1", "n2"), 2, "n1 was lost", "root cause: …")


def record(state_dir: Path, node_id: str, *generations: GenerationStatus, phase: str = "running") -> None:
    async def saved() -> None:
        files = StatusFiles(state_dir, "run", node_id)
        files.save(RunStatus("run", "host0", 200.0, phase, generations=generations))
        await files.written(GUARD_S)

    asyncio.run(saved())


def recorded(state_dir: Path) -> tuple[GenerationStatus, ...]:
    return asyncio.run(StatusFiles(state_dir, "run", "n9").recorded())


def test_an_agent_reads_what_all_agents_of_the_directory_recorded_and_takes_what_knows_most(
    tmp_path: Path,
) -> None:
    later = GenerationStatus(2, 170.0, nodes=("n2",), workers=1)
    for order in ([0, 1, 2, 3], [3, 2, 1, 0], [1, 2, 3, 0]):
        folder = tmp_path / "-".join(map(str, order))
        nodes = [("n1", (RUNS,)), ("n2", (EXPLAINED, later)), ("n3", (ENDED,)), ("n4", (NOT_RECORDED,))]
        for index in order:
            node_id, rows = nodes[index]
            record(folder, node_id, *rows)
        assert sorted(recorded(folder), key=lambda row: row.generation) == [EXPLAINED, later]


def test_of_the_records_of_a_large_world_only_some_are_read(tmp_path: Path) -> None:
    for number in range(1, 3 * READ_FILES):
        record(tmp_path, f"n{number}", GenerationStatus(number, 1.0, 2.0))
    assert len(recorded(tmp_path)) == READ_FILES


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
