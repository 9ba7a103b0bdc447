"""client.current(): who am I, under each launcher; and what a broken environment is told."""

from __future__ import annotations

import json
import os
import pickle
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from elastic_agent import client
from tests.client.support import AGENT_ENVIRONMENT, launched, run_script
from tests.waiting import GUARD_S

PRINT_ALL = """
import json
from elastic_agent import client

me = client.current()
stable = {name: getattr(me, name) for name in ("run_id", "node_id", "worker_id", "slot", "incarnation")}
print(json.dumps({"stable": stable, "placement": vars(me.placement)}))
"""

ALONE = {
    "rank": 0,
    "local_rank": 0,
    "world_size": 1,
    "local_world_size": 1,
    "node_rank": 0,
    "node_count": 1,
    "generation": 0,
    "restarts": 0,
    "first_generation": True,
}


def who(variables: dict[str, str]) -> tuple[dict[str, object], dict[str, object]]:
    seen = json.loads(run_script(PRINT_ALL, variables).stdout)
    return seen["stable"], seen["placement"]


@pytest.fixture
def environment(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """This process's environment, with no launcher's variables in it."""
    for name in os.environ.keys() - launched({}).keys():
        monkeypatch.delenv(name)
    return monkeypatch


def test_under_the_agent_all_values_come_from_the_agent() -> None:
    stable, placement = who(AGENT_ENVIRONMENT)
    assert stable == {
        "run_id": "digits",
        "node_id": "rack7-a",
        "worker_id": "rack7-a/1",
        "slot": 1,
        "incarnation": "5fe1c3",
    }
    assert placement == {
        "rank": 2,
        "local_rank": 1,
        "world_size": 4,
        "local_world_size": 3,
        "node_rank": 0,
        "node_count": 2,
        "generation": 6,
        "restarts": 1,
        "first_generation": False,
    }


def test_under_plain_python_the_world_is_one_worker() -> None:
    stable, placement = who({})
    host = os.uname().nodename
    assert stable == {
        "run_id": "local",
        "node_id": host,
        "worker_id": f"{host}/0",
        "slot": 0,
        "incarnation": "none",
    }
    assert placement == ALONE


def test_without_the_agent_both_ids_can_be_set_by_variables() -> None:
    stable, _ = who({"ELASTIC_AGENT_RUN_ID": "exp7", "ELASTIC_AGENT_NODE_ID": "desk"})
    assert (stable["run_id"], stable["worker_id"]) == ("exp7", "desk/0")


def test_a_script_that_sets_rank_and_world_size_is_a_world_of_one() -> None:
    _, placement = who({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"})
    assert placement == ALONE


@pytest.mark.prove
def test_under_torchrun_ids_survive_a_restart_of_the_workers(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        PRINT_ALL.replace("print(", "text = (")
        + textwrap.dedent(
            """
            import pathlib, sys
            here = pathlib.Path(__file__).parent
            (here / f"seen-{me.placement.restarts}-{me.placement.rank}.json").write_text(text)
            if me.placement.restarts == 0:
                sys.exit(me.placement.rank)
            """
        )
    )
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, "--max-restarts", "1", str(script)],
        env=launched({"OMP_NUM_THREADS": "1"}),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stderr
    before = json.loads((tmp_path / "seen-0-1.json").read_text())
    after = [json.loads((tmp_path / f"seen-1-{rank}.json").read_text()) for rank in (0, 1)]

    host = os.uname().nodename
    assert before["stable"] == after[1]["stable"]
    assert [worker["stable"]["worker_id"] for worker in after] == [f"{host}/0", f"{host}/1"]
    assert after[0]["stable"]["run_id"] == after[1]["stable"]["run_id"] not in ("", "local")
    two = {"world_size": 2, "local_world_size": 2, "rank": 1, "local_rank": 1}
    assert before["placement"] == {**ALONE, **two}
    assert after[1]["placement"] == {**ALONE, **two, "restarts": 1, "first_generation": False}


def test_repr_shows_the_stable_part_first_and_calls_the_rest_unstable(
    environment: pytest.MonkeyPatch,
) -> None:
    for name, value in AGENT_ENVIRONMENT.items():
        environment.setenv(name, value)
    stable, _, unstable = repr(client.current()).partition("UNSTABLE, this generation only: ")
    for name in ("run_id='digits'", "node_id='rack7-a'", "worker_id='rack7-a/1'", "slot=1", "'5fe1c3'"):
        assert name in stable
    for name in ("rank=2", "world_size=4", "generation=6", "restarts=1", "first_generation=False"):
        assert name in unstable
        assert name not in stable


def test_values_from_the_launcher_are_immutable(environment: pytest.MonkeyPatch) -> None:
    me = client.current()
    with pytest.raises(AttributeError, match="rank"):
        me.placement.rank = 1  # type: ignore[misc]
    with pytest.raises(AttributeError, match="checkpoint"):
        me.checkpoint = "x"  # type: ignore[attr-defined]
    assert me == client.current()


def test_workers_compare_by_value_and_can_be_pickled(environment: pytest.MonkeyPatch) -> None:
    me = client.current()
    copy = pickle.loads(pickle.dumps(me))
    assert copy == me
    assert hash(copy) == hash(me)
    environment.setenv("ELASTIC_AGENT_RUN_ID", "other")
    assert client.current() != me


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        (
            {"RANK": "two"},
            "RANK='two' in the environment; expected a whole number from 0 to 3, as WORLD_SIZE=4",
        ),
        ({"RANK": "4"}, "RANK='4' in the environment; expected a whole number from 0 to 3, as WORLD_SIZE=4"),
        ({"RANK": None}, "RANK is not set in the environment; expected a whole number from 0 to 3"),
        ({"LOCAL_RANK": "3"}, "LOCAL_RANK='3' in the environment; expected a whole number from 0 to 2"),
        ({"GROUP_RANK": "2"}, "GROUP_RANK='2' in the environment; expected a whole number from 0 to 1"),
        ({"WORLD_SIZE": "0"}, "WORLD_SIZE='0' in the environment; expected a whole number, at least 1."),
        ({"WORLD_SIZE": "2\n"}, r"WORLD_SIZE='2\n' "),
        ({"WORLD_SIZE": "9" * 400}, "WORLD_SIZE='999"),
        (
            {"LOCAL_WORLD_SIZE": "5"},
            "LOCAL_WORLD_SIZE='5' in the environment; expected a whole number, at least 1 ",
        ),
        ({"GROUP_WORLD_SIZE": None}, "GROUP_WORLD_SIZE is not set"),
        (
            {"ELASTIC_AGENT_GENERATION": "next"},
            "ELASTIC_AGENT_GENERATION='next' in the environment; expected a",
        ),
        (
            {"ELASTIC_AGENT_FIRST_GENERATION": "yes"},
            "ELASTIC_AGENT_FIRST_GENERATION='yes' in the environment; ",
        ),
        ({"ELASTIC_AGENT_SLOT": None}, "ELASTIC_AGENT_SLOT is not set"),
        ({"ELASTIC_AGENT_RESTARTS": "1.0"}, "ELASTIC_AGENT_RESTARTS='1.0'"),
        ({"ELASTIC_AGENT_NODE_ID": ""}, "ELASTIC_AGENT_NODE_ID='' in the environment; expected a string"),
    ],
)
def test_an_invalid_variable_is_reported_in_one_line(
    environment: pytest.MonkeyPatch, changes: dict[str, str | None], told: str
) -> None:
    for name, value in {**AGENT_ENVIRONMENT, **changes}.items():
        if value is not None:
            environment.setenv(name, value)
    with pytest.raises(client.MalformedEnvironmentError) as caught:
        client.current()
    message = str(caught.value)
    assert message.startswith(told)
    assert "\n" not in message
    assert len(message) < 400
