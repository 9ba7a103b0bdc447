"""What a launch reads from an event journal that several nodes share."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.launcher import LaunchError
from elastic_agent.launcher.agent_process import outcome
from elastic_agent.launcher.journal import Journal
from elastic_agent.linux import boot_id, pid_namespace

PID = 17


def write(path: Path, events: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(event) + "\n" for event in events))


def started(node: str, *, run: str = "run", **process: str) -> dict[str, Any]:
    here = {"pid": PID, "boot": boot_id(), "pid_namespace": pid_namespace()}
    return {"event": "agent_started", "run": run, "node": node, "incarnation": f"i-{node}", **here, **process}


def generation(number: int, *nodes: str, run: str = "run") -> list[dict[str, Any]]:
    """As each of its nodes records it."""
    world = [[node, f"i-{node}", 1, rank] for rank, node in enumerate(nodes)]
    common = {"run": run, "generation": number}
    plans = [{"event": "plan", "node": node, "world": world, **common} for node in nodes]
    return [*plans, *({"event": "workers_started", "node": node, **common} for node in nodes)]


@pytest.mark.parametrize("other", [{"boot": "of another host"}, {"pid_namespace": "of another container"}])
def test_agents_with_equal_pids_are_told_apart(tmp_path: Path, other: dict[str, str]) -> None:
    path = tmp_path / "journal"
    failed = {"event": "worker_exited", "slot": 0, "pid": 99, "returncode": 1, "run": "run"}
    write(
        path,
        [
            started("a"),
            started("b", **other),
            *generation(1, "b", "a"),
            {**failed, "node": "a", "generation": 1},
            *generation(2, "b"),  # the node of this launch has left
            {**failed, "node": "b", "generation": 2},
        ],
    )
    journal = Journal.read(path, 0, PID)
    assert (journal.generation, journal.ranks()) == (1, range(1, 2))
    assert [one.rank for one in journal.failed_workers()] == [1]


def test_other_runs_and_a_node_id_that_was_refused_do_not_count(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(
        path,
        [
            *(started("a"), started("b")),  # "a" was taken
            *generation(1, "a", "b"),
            *generation(5, "a"),
            *generation(7, "b", run="another"),
        ],
    )
    assert Journal.read(path, 0, PID).generation == 1


def test_lines_that_are_not_complete_are_skipped(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    write(path, [started("a"), *generation(3, "a")])
    with path.open("ab") as file:
        file.write(b'\xff\n"text"\n{}\n{"event": "state", "boott')
    assert Journal.read(path, 0, PID).generation == 3


def test_results_that_the_journal_does_not_explain_are_an_error(tmp_path: Path) -> None:
    (tmp_path / "results" / "2").mkdir(parents=True)
    (tmp_path / "journal").write_text("")
    journal = Journal.read(tmp_path / "journal", 0, PID)
    with pytest.raises(LaunchError, match="generation 2 has results, but the event journal"):
        outcome(print, tmp_path, journal, 0)
