"""Who may say that a node's earlier processes are gone."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.identity import IdentityError, acquire_node_id, start_ticks

Rewrite = Callable[[dict[str, Any]], None]


def leave_a_record(folder: Path, pid: int, rewrite: Rewrite | None = None) -> None:
    """An agent held n1, had this process, and is gone; ``rewrite`` changes what it wrote down."""
    node_id_lock = acquire_node_id(folder, "n1")
    ticks = start_ticks(pid)
    node_id_lock.record("old", [(pid, ticks if ticks is not None else 1)])
    node_id_lock.release()
    if rewrite is not None:
        file = folder / "n1.lock"
        body = json.loads(file.read_bytes())
        rewrite(body)
        file.write_text(json.dumps(body))


def predecessor(folder: Path) -> str | None:
    node_id_lock = acquire_node_id(folder, "n1", wait_s=0.1)
    node_id_lock.release()
    return node_id_lock.predecessor


def dead_pid() -> int:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    return process.pid


def test_a_predecessor_whose_processes_ended_is_proven_gone(tmp_path: Path) -> None:
    leave_a_record(tmp_path, dead_pid())
    assert predecessor(tmp_path) == "old"


def test_a_predecessor_with_a_live_process_is_not_proven_gone(tmp_path: Path) -> None:
    leave_a_record(tmp_path, os.getpid())
    assert predecessor(tmp_path) is None


def test_a_reused_pid_does_not_count_as_the_predecessors_process(tmp_path: Path) -> None:
    def started_earlier(body: dict[str, Any]) -> None:
        body["processes"] = [[pid, ticks - 1] for pid, ticks in body["processes"]]

    leave_a_record(tmp_path, os.getpid(), started_earlier)
    assert predecessor(tmp_path) == "old"


@pytest.mark.parametrize(
    "elsewhere", [{"boot": "another one"}, {"boot": ""}, {"namespace": "pid:[1]"}, {"namespace": ""}]
)
def test_processes_of_another_boot_or_container_are_not_proven_gone(
    tmp_path: Path, elsewhere: dict[str, str]
) -> None:
    """The state directory may lie on a volume that goes from machine to machine with a container of one name."""
    leave_a_record(tmp_path, dead_pid(), lambda body: body.update(elsewhere))
    assert predecessor(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "not JSON", '{"incarnation": "old"}', "[1]"])
def test_an_unreadable_record_does_not_prove_a_predecessor_gone(tmp_path: Path, text: str) -> None:
    (tmp_path / "n1.lock").write_text(text)
    assert predecessor(tmp_path) is None


def test_a_node_id_in_use_is_refused_in_one_line(tmp_path: Path) -> None:
    held = acquire_node_id(tmp_path, "n1")
    with pytest.raises(IdentityError, match="node id n1 is in use by another agent on this machine;"):
        acquire_node_id(tmp_path, "n1")
    held.record("life", [])
    with pytest.raises(
        IdentityError, match=rf"agent on this machine \(process {os.getpid()}, started .*\); wait until"
    ):
        acquire_node_id(tmp_path, "n1")
    held.release()
