"""The agents of one machine share out its node ids, and take the same ones again after they were killed."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_agent.agent import identity
from elastic_agent.agent.identity import IdentityError, NodeIdLock, acquire_node_id, host_name, prune_node_ids

HOLDER = """
import sys
from pathlib import Path
from elastic_agent.agent.identity import IdentityError, acquire_node_id
try:
    seat = acquire_node_id(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
except IdentityError as error:
    print("refused:", error, flush=True)
else:
    print(seat.node_id, seat.predecessor, flush=True)
    seat.record(sys.argv[3] if len(sys.argv) > 3 else "life", [])
    print("written down", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holders(folder: Path, count: int, *words: str) -> Iterator[list[str]]:
    """Processes that take a seat at the same time, and what each says of it; killed in the end."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HOLDER, str(folder), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        said = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith("refused"):
                assert process.stdout.readline() == "written down\n"
            said.append(line)
        yield said


def test_a_node_is_named_after_its_host(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, short in (("gpu-7.cluster.example", "gpu-7"), ("a_b\u00e9", "a_b-"), ("", "node")):
        monkeypatch.setattr("socket.gethostname", lambda name=name: name)
        assert host_name() == short


def test_agents_get_distinct_ids_and_the_same_ones_after_all_were_killed(tmp_path: Path) -> None:
    base = host_name()
    ids = [base, f"{base}-2", f"{base}-3"]
    with holders(tmp_path, 3) as said:
        assert sorted(said) == [f"{one} None" for one in ids]
    with holders(tmp_path, 3) as said:
        assert sorted(said) == [f"{one} life" for one in ids], (
            "the predecessors had no process that still lives"
        )
    with holders(tmp_path, 1) as said:
        assert said == [f"{base} life"], "the first free one"


def test_the_other_agent_of_a_machine_is_named_with_its_process(tmp_path: Path) -> None:
    base = host_name()
    with holders(tmp_path, 1):
        lock = acquire_node_id(tmp_path, None)
        assert lock.node_id == f"{base}-2"
        assert re.fullmatch(rf"{base} \(process \d+, started \w+ \d+, [\d:]+\)", lock.beside)
        assert f"takes part in this run as node {lock.beside}; this one is node {base}-2" in lock.warning
        assert "Ctrl-C ends this one" in lock.warning
        lock.release()


def test_one_of_two_agents_with_the_same_explicit_id_is_refused_in_one_line(tmp_path: Path) -> None:
    with holders(tmp_path, 2, "n1") as said:
        held, refused = sorted(said)
        assert held == "n1 None"
        assert refused.startswith("refused: node id n1 is in use by another agent on this machine")
        with pytest.raises(IdentityError):
            acquire_node_id(tmp_path, "n1")
        acquire_node_id(tmp_path, "n2").release()
    acquire_node_id(tmp_path, "n1").release()


def test_node_id_locks_are_per_run(tmp_path: Path) -> None:
    with holders(tmp_path / "one", 1) as first, holders(tmp_path / "other", 1) as second:
        assert first == second == [f"{host_name()} None"]


# --- seats of runs that are over ------------------------------------------------------------------


def leave_seats(nodes: Path, count: int) -> list[NodeIdLock]:
    """Runs of one node each, the first one the oldest; their agents hold the seats."""
    seats = []
    for number in range(count):
        seats.append(acquire_node_id(nodes / f"run-{number}", "n1"))
        os.utime(nodes / f"run-{number}" / "n1.lock", (1000.0 + number, 1000.0 + number))
    return seats


def test_unheld_node_id_locks_of_old_runs_are_removed(tmp_path: Path) -> None:
    held, *others = leave_seats(tmp_path, 5)
    for node_id_lock in others:
        node_id_lock.release()
    (tmp_path / "run-1" / "notes").touch()
    prune_node_ids(tmp_path, keep=2)
    assert sorted(os.listdir(tmp_path)) == ["run-0", "run-1", "run-3", "run-4"]
    assert os.listdir(tmp_path / "run-1") == ["notes"]
    assert os.listdir(tmp_path / "run-0") == ["n1.lock"]
    held.release()


def test_one_sweep_removes_a_limited_number_of_folders(tmp_path: Path) -> None:
    for node_id_lock in leave_seats(tmp_path, 5):
        node_id_lock.release()
    prune_node_ids(tmp_path, keep=1, at_most=2)
    assert sorted(os.listdir(tmp_path)) == ["run-2", "run-3", "run-4"]


def test_a_node_id_lock_swept_during_its_acquisition_is_still_acquired(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    acquire_node_id(tmp_path / "run", "n1").release()
    lock = identity.fcntl.flock
    swept = []

    def sweep_first(handle: int, how: int) -> None:
        if not swept:
            swept.append(True)
            (tmp_path / "run" / "n1.lock").unlink()
            (tmp_path / "run").rmdir()
        lock(handle, how)

    monkeypatch.setattr(identity.fcntl, "flock", sweep_first)
    node_id_lock = acquire_node_id(tmp_path / "run", "n1")
    with pytest.raises(IdentityError):
        acquire_node_id(tmp_path / "run", "n1")
    node_id_lock.release()


def test_a_sweep_without_files_does_nothing(tmp_path: Path) -> None:
    prune_node_ids(tmp_path / "none")
