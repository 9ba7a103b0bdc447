"""Two runs of one name do not go on from each other's state."""

from __future__ import annotations

import dataclasses
import json
import os
import socket
import sys
from pathlib import Path

import pytest

from elastic_agent.agent import run_claim
from elastic_agent.agent.run_claim import (
    CLAIM_FILE,
    ClaimedEndpoint,
    OtherCommandError,
    RunClaim,
    RunElsewhereError,
)
from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import Job
from elastic_agent.transport import connect
from elastic_agent.values import Endpoint
from tests.agent.support import elastic_agent
from tests.names import unique
from tests.ports import free_port


def place(host: str, port: int) -> ClaimedEndpoint:
    return ClaimedEndpoint.of(Endpoint(host, port), "c10d")


take = RunClaim.take


def move_to_another_machine(folder: Path) -> None:
    """What an agent of another machine would have written, on a file system that both see."""
    file = folder / CLAIM_FILE
    body = json.loads(file.read_bytes())
    keys = [key.replace(body["boot"], "another boot") for key in body["keys"]]
    file.write_text(json.dumps({**body, "boot": "another boot", "keys": keys}))


def test_agents_of_one_endpoint_share_the_claim(tmp_path: Path) -> None:
    for at in (place("n1.example", 29400), ClaimedEndpoint.of(Endpoint("10.0.0.1", 2379), "etcd")):
        folder = tmp_path / at.backend
        for claim in (take(folder, at), take(folder, at)):
            claim.release()


def test_a_command_that_is_no_text_is_claimed_and_compared_as_any_other(tmp_path: Path) -> None:
    endpoint = Endpoint("n1.example", 29400)
    claims = [
        ClaimedEndpoint.of(endpoint, "c10d", f"train.py caf{end}") for end in ("\udce9", "\udce9", "\udce8")
    ]
    first = take(tmp_path, claims[0])
    take(tmp_path, claims[1]).release()
    with pytest.raises(OtherCommandError, match=r"train\.py caf"):
        take(tmp_path, claims[2])
    first.release()


def test_an_endpoint_is_the_same_under_all_of_its_names(tmp_path: Path) -> None:
    first = take(tmp_path, place("localhost", 29400))
    second = take(tmp_path, place("127.0.0.1", 29400))
    first.release()
    take(tmp_path, place("::1", 29400)).release()
    second.release()


@pytest.mark.parametrize(
    "other",
    [place("n1", 29401), place("n2", 29400), place("localhost", 29400), ClaimedEndpoint.of(None, "c10d")],
)
def test_a_run_of_the_same_name_at_another_endpoint_is_refused_while_agents_live(
    tmp_path: Path, other: ClaimedEndpoint
) -> None:
    first = take(tmp_path, place("n1", 29400))
    with pytest.raises(RunElsewhereError, match="n1:29400"):
        take(tmp_path, other)
    first.release()
    take(tmp_path, other).release()


def test_agents_of_one_machine_run_one_command_and_others_may_run_another(tmp_path: Path) -> None:
    endpoint = Endpoint("n1", 29400)
    small, large = (
        ClaimedEndpoint.of(endpoint, "c10d", f"train.py --config {size}") for size in ("small", "large")
    )
    first = take(tmp_path, small)
    take(tmp_path, small).release()
    with pytest.raises(OtherCommandError, match=r"^train.py --config small$"):
        take(tmp_path, large)
    move_to_another_machine(tmp_path)
    take(tmp_path, dataclasses.replace(large, keys=["c10d n1:29400"])).release()
    first.release()
    take(tmp_path, large).release()


def test_a_run_can_leave_a_dead_machine_whose_lock_remains(
    tmp_path: Path,
) -> None:
    """A file server keeps the locks of a machine that lost its power for a while."""
    port = free_port()
    lock_of_the_dead = take(tmp_path, ClaimedEndpoint("n1", "c10d", "b", ["c10d n1"], ["127.0.0.1", port]))
    move_to_another_machine(tmp_path)
    with socket.socket() as store:
        store.bind(("127.0.0.1", port))
        store.listen()
        with pytest.raises(RunElsewhereError, match="n1"):
            take(tmp_path, place("n2", 29400))
    moved = take(tmp_path, place("n2", 29400))
    with pytest.raises(RunElsewhereError, match="n2:29400"):
        take(tmp_path, place("n3", 29400))
    moved.release()
    lock_of_the_dead.release()


def test_a_loopback_endpoint_of_another_machine_counts_as_in_use(
    tmp_path: Path,
) -> None:
    held = take(tmp_path, place("localhost", 29400))
    move_to_another_machine(tmp_path)
    with pytest.raises(RunElsewhereError, match="localhost:29400"):
        take(tmp_path, place("localhost", 29400))
    held.release()


def life(host: str, job: str, requeues: int, command: str = "a") -> ClaimedEndpoint:
    """A start of a Slurm job whose first node is ``host``."""
    return ClaimedEndpoint.of(Endpoint(host, 29400), "c10d", command, Job((command,), job, requeues))


@pytest.mark.parametrize(
    ("runs", "starts", "stops"),
    [
        (life("n1", "7", 0), life("n2", "7", 1), True),
        (life("n1", "7", 1), life("n2", "7", 3), True),
        (life("n1", "7", 0), life("n2", "7", 1, command="b"), True),
        (life("n1", "7", 0), life("n2", "7", 0), False),
        (life("n1", "7", 1), life("n2", "7", 0), False),
        (life("n1", "7", 0), life("n2", "8", 1), False),
        (life("n1", "", 0), life("n2", "7", 1), False),
        (life("n1", "7", 0), life("n2", "", 0), False),
    ],
    ids=[
        "requeued",
        "requeued again",
        "requeued with another command",
        "another step",
        "earlier start",
        "another job",
        "no job runs",
        "no job starts",
    ],
)
def test_only_a_later_start_of_the_same_job_asks_the_agents_of_a_run_to_stop(
    tmp_path: Path, runs: ClaimedEndpoint, starts: ClaimedEndpoint, stops: bool
) -> None:
    held = take(tmp_path, runs)
    assert not held.is_to_stop()
    with pytest.raises(RunElsewhereError) as refused:
        take(tmp_path, starts)
    assert (held.is_to_stop(), refused.value.is_earlier_life) == (stops, stops)
    late = take(tmp_path, runs)
    assert late.is_to_stop() == stops, "an agent of the same start that comes later"
    for claim in (held, late):
        claim.release()


def test_a_request_to_stop_is_gone_when_the_next_start_takes_part(tmp_path: Path) -> None:
    held = take(tmp_path, life("n1", "7", 0))
    for requeues in (2, 1):  # the second has been requeued itself meanwhile, and has not noticed yet
        with pytest.raises(RunElsewhereError):
            take(tmp_path, life("n2", "7", requeues))
    held.release()
    overtaken = take(tmp_path, life("n2", "7", 1))
    assert overtaken.is_to_stop(), "the third start still waits"
    overtaken.release()
    last = take(tmp_path, life("n3", "7", 2))
    assert not last.is_to_stop()
    assert sorted(file.name for file in tmp_path.iterdir()) == [CLAIM_FILE]
    last.release()


IMPATIENT = """
import sys
from elastic_agent.agent import run_claim
from elastic_agent.cli.main import main

run_claim.PATIENCE_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_an_agent_refuses_to_start_while_agents_of_another_endpoint_use_its_state(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')")
    endpoint = f"127.0.0.1:{free_port()}"
    run_id = unique("exp7")
    options = ["--state-dir", str(tmp_path), "--rdzv-id", run_id, "--rdzv-endpoint", endpoint]
    held = take(tmp_path / "nodes" / run_id, place("n1.example", 29400))
    refused = elastic_agent(*options, str(script), command=[sys.executable, "-c", IMPATIENT])
    held.release()
    assert (refused.returncode, refused.stdout) == (ExitCode.USAGE, ""), refused.stderr
    assert f"run {run_id} is already running at n1.example:29400" in refused.stderr


def test_what_another_agent_has_put_in_the_place_of_a_dead_machines_lock_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    dead = ClaimedEndpoint("n1", "c10d", "b", ["c10d n1"], ["127.0.0.1", free_port()])
    lock_of_the_dead = take(tmp_path, dead)
    move_to_another_machine(tmp_path)
    others: list[RunClaim] = []

    def find_out(host: str, port: int, timeout_s: float) -> socket.socket:
        monkeypatch.setattr(run_claim, "connect", connect)
        others.append(take(tmp_path, place("n2", 29400)))  # another agent is quicker
        return connect(host, port, timeout_s)

    monkeypatch.setattr(run_claim, "connect", find_out)
    with pytest.raises(RunElsewhereError, match="n2:29400"):
        take(tmp_path, place("n3", 29400))
    for claim in (lock_of_the_dead, *others):
        claim.release()


def test_a_folder_that_is_swept_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    at, really = place("n1", 29400), os.open

    def swept(path: Path, flags: int, mode: int) -> int:
        monkeypatch.setattr(os, "open", really)
        folder.rmdir()
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", swept)
    take(folder, at).release()
    assert (folder / CLAIM_FILE).exists()
