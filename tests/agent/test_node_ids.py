"""The agents of one machine share out its node ids, and take the same ones again after they were killed."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent import identity
from elastic_agent.agent.identity import IdentityError, NodeIdLock, acquire_node_id, host_name, prune_node_ids
from elastic_agent.linux import start_ticks
from tests.agent.support import PATIENCE_S, started
from tests.names import unique
from tests.ports import free_port

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
        assert sorted(said) == [f"{node_id} None" for node_id in ids]
    with holders(tmp_path, 3) as said:
        assert sorted(said) == [f"{node_id} life" for node_id in ids], (
            "the predecessors had no process that still lives"
        )
    with holders(tmp_path, 1) as said:
        assert said == [f"{base} life"], "the first free one"


def test_the_other_agent_of_a_machine_is_named_with_its_process(tmp_path: Path) -> None:
    base = host_name()
    with holders(tmp_path, 1):
        lock = acquire_node_id(tmp_path, None)
        assert lock.node_id == f"{base}-2"
        assert re.search(
            rf"as node {base} \(process \d+, started \w+ \d+, [\d:]+\); this one is node {base}-2",
            lock.warning,
        )
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


@pytest.mark.prove
def test_two_machines_with_the_same_host_name_both_take_part(tmp_path: Path) -> None:
    """The second one is refused, takes the next free id, and its workers run (all the guard says was said before)."""
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['ELASTIC_AGENT_NODE_ID'], os.environ['WORLD_SIZE'])")
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--rdzv-endpoint", endpoint, "--rdzv-id", unique("twins"), "--nnodes", "2"]
    options += ["--lease-ttl", "10"]  # the refused agent's lease has to run out
    first, second = (
        started(*options, "--state-dir", str(tmp_path / name), str(script)) for name in ("one", "other")
    )
    with first as one, second as other:
        agents = [one.process, other.process]
        said = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    # A stall of the machine may cost a lease, and the workers run again.
    different = sorted(line for lines in said for line in {*lines.splitlines()})
    assert different == [f"{host_name()} 2", f"{host_name()}-2 2"]
    assert [agent.returncode for agent in agents] == [0, 0]


# --- who may say that a node's earlier processes are gone ---------------------------------------------

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


def started_earlier(body: dict[str, Any]) -> None:
    body["processes"] = [[pid, ticks - 1] for pid, ticks in body["processes"]]


@pytest.mark.parametrize(
    ("is_alive", "rewrite", "proven"),
    [(False, None, "old"), (True, None, None), (True, started_earlier, "old")],
    ids=["it has ended", "it lives", "its pid was given to another process"],
)
def test_a_predecessor_is_proven_gone_if_the_processes_that_it_recorded_are(
    tmp_path: Path, is_alive: bool, rewrite: Rewrite | None, proven: str | None
) -> None:
    leave_a_record(tmp_path, os.getpid() if is_alive else dead_pid(), rewrite)
    assert predecessor(tmp_path) == proven


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
