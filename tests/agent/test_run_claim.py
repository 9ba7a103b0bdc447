"""Two runs of one name do not go on from each other's state."""

from __future__ import annotations

import contextlib
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import msgspec
import pytest

from elastic_agent.agent.run_claim import CLAIM_FILE, Claim, OtherCommandError, OtherRunError
from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import Job
from elastic_agent.values import Endpoint
from tests.agent.support import elastic_agent
from tests.names import unique
from tests.ports import free_port


def place(host: str, port: int = 29400, command: str = "") -> Claim:
    return Claim.of(Endpoint(host, port), "c10d", command)


def life(host: str, job: str, requeues: int) -> Claim:
    """A start of a Slurm job whose first node is ``host``."""
    return Claim.of(Endpoint(host, 29400), "c10d", "a", Job(("a",), job, requeues))


@contextlib.contextmanager
def held(claim: Claim, folder: Path) -> Iterator[None]:
    """An agent that takes part."""
    handle = claim.take(folder)
    try:
        yield
    finally:
        os.close(handle)


def move_to_another_machine(folder: Path) -> None:
    """What an agent of another machine would have written, on a file system that both see."""
    file = folder / CLAIM_FILE
    body = json.loads(file.read_bytes())
    keys = [key.replace(body["boot"], "another boot") for key in body["keys"]]
    file.write_text(json.dumps({**body, "boot": "another boot", "keys": keys}))


@pytest.mark.parametrize(
    ("runs", "starts"),
    [
        (place("n1.example"), place("n1.example")),
        (Claim.of(Endpoint("10.0.0.1", 2379), "etcd"), Claim.of(Endpoint("10.0.0.1", 2379), "etcd")),
        (place("localhost"), place("127.0.0.1")),
        (place("127.0.0.1"), place("::1")),
        (place("n1", command="train.py caf\udce9"), place("n1", command="train.py caf\udce9")),
    ],
    ids=["c10d", "etcd", "localhost", "IPv6", "a command that is no text"],
)
def test_agents_of_one_endpoint_and_command_share_the_claim(
    tmp_path: Path, runs: Claim, starts: Claim
) -> None:
    with held(runs, tmp_path), held(starts, tmp_path):
        pass


@pytest.mark.parametrize(
    "other",
    [place("n1", 29401), place("n2"), place("localhost"), Claim.of(None, "c10d")],
    ids=["port", "host", "localhost", "standalone"],
)
def test_a_run_of_the_same_name_at_another_endpoint_is_refused_while_agents_live(
    tmp_path: Path, other: Claim
) -> None:
    with held(place("n1"), tmp_path), pytest.raises(OtherRunError, match="n1:29400"):
        other.take(tmp_path)
    with held(other, tmp_path):
        pass


def test_agents_of_one_machine_run_one_command_and_others_may_run_another(tmp_path: Path) -> None:
    small, large = (
        place("n1", command="train.py --config small"),
        place("n1", command="train.py --config large"),
    )
    with held(small, tmp_path):
        with pytest.raises(OtherCommandError, match=r"^train.py --config small$"):
            large.take(tmp_path)
        move_to_another_machine(tmp_path)
        with held(msgspec.structs.replace(large, keys=["c10d n1:29400"]), tmp_path):
            pass
    with held(large, tmp_path):
        pass


def test_a_loopback_endpoint_of_another_machine_is_another_one(tmp_path: Path) -> None:
    with held(place("localhost"), tmp_path):
        move_to_another_machine(tmp_path)
        with pytest.raises(OtherRunError, match="localhost:29400"):
            place("localhost").take(tmp_path)


@pytest.mark.parametrize(
    ("runs", "starts", "is_earlier"),
    [
        (life("n1", "7", 0), life("n2", "7", 1), True),
        (life("n1", "7", 1), life("n2", "7", 3), True),
        (life("n1", "7", 0), life("n2", "7", 0), False),
        (life("n1", "7", 1), life("n2", "7", 0), False),
        (life("n1", "7", 0), life("n2", "8", 1), False),
        (life("n1", "", 0), life("n2", "7", 1), False),
        (life("n1", "7", 0), life("n2", "", 0), False),
    ],
    ids=[
        "requeued",
        "requeued again",
        "same start",
        "earlier start",
        "another job",
        "no job runs",
        "no job starts",
    ],
)
def test_only_a_later_start_of_the_same_job_waits_long_for_the_agents_of_a_run(
    tmp_path: Path, runs: Claim, starts: Claim, is_earlier: bool
) -> None:
    with held(runs, tmp_path), pytest.raises(OtherRunError) as refused:
        starts.take(tmp_path)
    assert refused.value.is_earlier_life == is_earlier


IMPATIENT = """
import sys
from elastic_agent.agent import find_run
from elastic_agent.cli.main import main

find_run.PATIENCE_S = 0.0
sys.exit(main(sys.argv[1:]))
"""


def test_an_agent_refuses_to_start_while_agents_of_another_endpoint_use_its_state(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trains')")
    endpoint = f"127.0.0.1:{free_port()}"
    run_id = unique("exp7")
    options = ["--state-dir", str(tmp_path), "--rdzv-id", run_id, "--rdzv-endpoint", endpoint]
    with held(place("n1.example"), tmp_path / "nodes" / run_id):
        refused = elastic_agent(*options, str(script), command=[sys.executable, "-c", IMPATIENT])
    assert (refused.returncode, refused.stdout) == (ExitCode.USAGE, ""), refused.stderr
    assert f"run {run_id} is already running at n1.example:29400" in refused.stderr
    claim = tmp_path / "nodes" / run_id / CLAIM_FILE
    assert f"if that machine is dead, remove {claim}" in refused.stderr


def test_a_folder_that_is_swept_meanwhile_is_made_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    claim, really = place("n1"), os.open

    def swept(path: Path, flags: int, mode: int) -> int:
        monkeypatch.setattr(os, "open", really)
        folder.rmdir()
        return really(path, flags, mode)

    monkeypatch.setattr(os, "open", swept)
    with held(claim, folder):
        pass
    assert (folder / CLAIM_FILE).exists()
