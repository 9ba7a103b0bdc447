"""The host of the endpoint where the names of nodes are Slurm's alone."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.slurm.job import reachable_endpoint, with_missing_nodes
from elastic_agent.protocol import Waiting
from elastic_agent.values import Endpoint
from tests.agent.support import options_for, started
from tests.names import unique
from tests.ports import free_port

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "unknown-[0-1].invalid,localhost",
}
FIRST = Endpoint("unknown-0.invalid", 24711)
ELSEWHERE = Endpoint("elsewhere.invalid")

# As Slurm 22.05 prints it, shortened.
LINE = (
    "NodeName=unknown-0.invalid Arch=x86_64 CPUTot=2 NodeAddr={address} NodeHostName={hostname} Port=17001 "
    "OS=Linux 6.1.0 #1 SMP  RealMemory=1000 State=DOWN*+DRAIN Weight=1 Reason=a State=IDLE NodeAddr=1.2.3.4 \n"
)


@pytest.fixture
def answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What an ``scontrol`` on the PATH prints of two nodes; without it, the command fails as for an unknown node."""
    file = tmp_path / "answer"
    command = tmp_path / "scontrol"
    known = "|".join(
        f'"show node -o {endpoint.host}"' for endpoint in (FIRST, ELSEWHERE, Endpoint("localhost"))
    )
    command.write_text(f'#!/bin/sh\ncase "$*" in {known}) exec /bin/cat {file} ;; esac\nexit 1\n')
    command.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path))
    return file


@pytest.mark.parametrize(
    ("address", "reached"),
    [("10.1.2.3", "10.1.2.3"), ("alias.invalid", "localhost"), ("", FIRST.host)],
    ids=["Slurm's address", "the machine's name", "no answer"],
)
def test_a_name_that_only_slurm_knows_is_replaced_by_what_slurm_answers(
    answer: Path, address: str, reached: str
) -> None:
    """It is read from its field, not from the reason, which may contain anything."""
    if address:
        answer.write_text(LINE.format(address=address, hostname="localhost"))
    assert reachable_endpoint(FIRST, STEP) == Endpoint(reached, FIRST.port)


def test_of_several_hosts_all_are_replaced_that_are_nodes_of_the_step(answer: Path) -> None:
    """One that resolves, too: each node may know its own name, and the list has to be the same on all."""
    names = ("localhost", "unknown-0.invalid", "elsewhere.invalid")
    first, *others = (Endpoint(name, 24711) for name in names)
    answer.write_text(LINE.format(address="10.1.2.3", hostname="localhost"))
    found = reachable_endpoint(Endpoint(first.host, 24711, tuple(others)), STEP)
    assert [member.host for member in found.members] == ["10.1.2.3", "10.1.2.3", "elsewhere.invalid"]


@pytest.mark.parametrize(
    ("endpoint", "environ"),
    [
        (Endpoint("localhost"), STEP),
        (ELSEWHERE, STEP),
        (FIRST, {**STEP, "SLURM_STEP_ID": "", "SLURM_JOB_ID": ""}),
    ],
    ids=["a name that resolves", "no node of this step", "not in a step"],
)
def test_only_names_of_slurm_nodes_are_queried(
    answer: Path, endpoint: Endpoint, environ: dict[str, str]
) -> None:
    answer.write_text(LINE.format(address="10.1.2.3", hostname="localhost"))
    assert reachable_endpoint(endpoint, environ) == endpoint


def test_nodes_of_the_step_whose_agents_have_not_joined_are_named(tmp_path: Path) -> None:
    step = {**STEP, "SLURM_STEP_NODELIST": "localhost,n[2-3].invalid", "SLURMD_NODENAME": "localhost"}
    options = ("--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--rdzv-id", unique("step"))
    with started(*options_for(tmp_path, "", *options), variables=step) as agent:
        line = agent.log_until("waiting for 2 more nodes")
        agent.process.terminate()
        agent.end()
    joined = "(at least 3 required); joined: localhost (1 worker)"
    assert f"{joined}; not joined: n2.invalid, n3.invalid (nodes of this Slurm step)" in line


def test_no_node_of_a_step_is_called_missing_where_agents_have_other_names() -> None:
    step = {**STEP, "SLURM_STEP_NODELIST": "n[1-20]"}
    named = Waiting("waiting", True, ("n1", "n2"))
    missing = "n3, n4, n5, n6, n7, n8, n9, n10 and 10 more"
    assert (
        with_missing_nodes(named, step).reason == f"waiting; not joined: {missing} (nodes of this Slurm step)"
    )
    for waiting in (Waiting("waiting", True, ("n1", "mine")), Waiting("waiting", True), Waiting("waiting")):
        assert with_missing_nodes(waiting, step) == waiting
    assert with_missing_nodes(named, {}) == named
