"""Settings that follow from what Slurm tells the tasks of a job step."""

from __future__ import annotations

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.sources import Layer
from elastic_agent.config.sources.slurm import expand_hosts
from elastic_agent.config.value_types import NodeRange
from elastic_agent.values import Endpoint
from tests.config.support import Shell

STEP = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_JOB_NODELIST": "n[1-4]",
    "SLURM_STEP_NODELIST": "n[2-4]",
    "SLURM_NODEID": "1",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURMD_NODENAME": "n3",
    "SLURM_GPUS_ON_NODE": "2",
}


def test_a_slurm_step_needs_no_options(shell: Shell) -> None:
    resolved = shell.load(variables=STEP)
    settings = resolved.settings
    assert settings.nnodes == NodeRange(3, 3)
    assert settings.rdzv_endpoint == Endpoint("n2", 24711)
    assert settings.rdzv_id == "slurm-4711"
    assert (settings.node_id, settings.node_rank, settings.nproc_per_node) == ("n3", 1, "2")
    assert resolved.sources["rdzv_endpoint"].layer is Layer.SITE
    assert str(resolved.sources["nproc_per_node"]) == "Slurm (SLURM_GPUS_ON_NODE)"


ARRAY = {"SLURM_JOB_ID": "4713", "SLURM_ARRAY_JOB_ID": "4711", "SLURM_ARRAY_TASK_ID": "2"}
# As `srun --het-group=0,1` in Slurm 22.05: the second of three nodes, in the second component.
COMPONENT = {
    "SLURM_HET_SIZE": "2",
    "SLURM_JOB_ID_HET_GROUP_1": "4712",
    "SLURM_JOB_NODELIST_HET_GROUP_0": "big1",
    "SLURM_JOB_NODELIST_HET_GROUP_1": "small[1-2]",
    "SLURM_STEP_NODELIST": "big1,small[1-2]",
    "SLURM_STEP_NUM_NODES": "3",
    "SLURMD_NODENAME": "small1",
}


@pytest.mark.parametrize(
    ("changes", "run_id", "endpoint", "nodes"),
    [
        ({"SLURM_STEP_NODELIST": "n3"}, "slurm-4711", None, 1),
        (ARRAY, "slurm-4711_2", Endpoint("n2", 24713), 3),  # tasks of an array may share a node
        ({**ARRAY, "SLURM_RESTART_COUNT": "1"}, "slurm-4711_2", Endpoint("n2", 24713), 3),
        ({"SLURM_STEP_ID": "1"}, "slurm-4711.1", Endpoint("n2", 24711), 3),
        (COMPONENT, "slurm-4711", Endpoint("big1", 24711), 3),
        ({"SLURM_JOB_ID": None}, None, None, 1),
        ({"SLURM_STEP_ID": None}, None, None, 1),
    ],
    ids=[
        "one node",
        "an array",
        "an array that was requeued",
        "a further step",
        "a heterogeneous job",
        "no job",
        "no step",
    ],
)
def test_each_step_of_a_job_and_task_of_an_array_is_a_run_of_its_own(
    shell: Shell, changes: dict[str, str | None], run_id: str | None, endpoint: Endpoint | None, nodes: int
) -> None:
    changed = {name: value for name, value in {**STEP, **changes}.items() if value is not None}
    settings = shell.load(variables=changed).settings
    assert (settings.rdzv_id, settings.rdzv_endpoint) == (run_id, endpoint)
    assert settings.nnodes == NodeRange(nodes, nodes)
    assert settings.standalone is (nodes == 1)


def test_without_gpus_the_usual_default_applies(shell: Shell) -> None:
    assert shell.load(variables={**STEP, "SLURM_GPUS_ON_NODE": ""}).settings.nproc_per_node == "gpu-or-1"


@pytest.mark.parametrize("layer", ["flag", "variable"])
def test_settings_of_the_user_take_precedence_over_slurm(shell: Shell, layer: str) -> None:
    said = {
        "nnodes": "1:3",
        "rdzv_endpoint": "head:1234",
        "rdzv_id": "mine",
        "nproc_per_node": "5",
        "node_id": "x",
    }
    if layer == "flag":
        argv = [word for name, value in said.items() for word in (f"--{name.replace('_', '-')}", value)]
        settings = shell.load(argv, STEP).settings
    else:
        names = {name: f"ELASTIC_AGENT_{name.upper()}" for name in said} | {
            "node_id": "ELASTIC_AGENT_SET_NODE_ID"
        }
        settings = shell.load((), STEP | {names[name]: value for name, value in said.items()}).settings
    assert settings.nnodes == NodeRange(1, 3)
    assert settings.rdzv_endpoint == Endpoint("head", 1234)
    assert (settings.rdzv_id, settings.nproc_per_node, settings.node_id) == ("mine", "5", "x")


def test_another_rendezvous_of_the_user_takes_precedence_over_slurms_endpoint(shell: Shell) -> None:
    assert shell.load(["--master-addr", "head"], STEP).settings.rdzv_endpoint == Endpoint("head", 29500)
    alone = shell.load(["--standalone"], STEP).settings
    assert (alone.rdzv_endpoint, alone.nnodes) == (None, NodeRange(1, 1))
    with pytest.raises(UsageError, match="requires the etcd members"):
        shell.load(["--rdzv-backend", "etcd"], STEP)


def test_more_nodes_than_slurm_allocated_is_an_immediate_error(shell: Shell) -> None:
    with pytest.raises(UsageError) as error:
        shell.load(["--nnodes", "4:8"], STEP)
    assert str(error.value).startswith(
        '--nnodes: got "4:8", but Slurm allocated only 3 to this step (n[2-4]); expected at most 3'
    )
    with pytest.raises(UsageError, match=r"Slurm allocated only 1 to this step \(n3\)"):
        shell.load(["--nnodes", "2"], {**STEP, "SLURM_STEP_NODELIST": "n3"})


@pytest.mark.parametrize(
    "elsewhere",
    [
        ["--rdzv-endpoint", "head:29400"],
        ["--master-addr", "head"],
        ["--rdzv-backend", "etcd", "--rdzv-endpoint", "head"],
    ],
)
def test_several_jobs_may_share_an_explicit_endpoint(shell: Shell, elsewhere: list[str]) -> None:
    assert shell.load(
        ["--nnodes", "4:8", "--rdzv-id", "mine", *elsewhere], STEP
    ).settings.nnodes == NodeRange(4, 8)


@pytest.mark.parametrize(
    ("endpoint", "told"),
    [
        ("head:29400", ""),
        (
            "localhost:29400",
            "which on each of this step's nodes (n[2-4]) is the node itself; without it, the endpoint is on n2",
        ),
        ("n3.example.org:29400", ""),
        ("10.0.0.7:29400", ""),
    ],
)
def test_an_endpoint_outside_the_job_is_warned_about(shell: Shell, endpoint: str, told: str) -> None:
    resolved = shell.load(["--rdzv-endpoint", endpoint], STEP)
    lines = [note.text for note in resolved.notes if "step" in note.text]
    assert len(lines) == (1 if told else 0)
    assert not told or told in lines[0]
    assert str(resolved.settings.rdzv_endpoint) == endpoint


def test_a_second_agent_on_a_slurm_node_is_refused_with_advice(shell: Shell) -> None:
    with pytest.raises(
        UsageError, match=r"started at least 2 agents on this node; .* srun --ntasks-per-node=1"
    ):
        shell.load(variables={**STEP, "SLURM_LOCALID": "1"})


@pytest.mark.parametrize(
    ("text", "hosts"),
    [
        ("n1", "n1"),
        ("n[1-3]", "n1 n2 n3"),
        ("n[001-003,7],login", "n001 n002 n003 n7 login"),
        ("n[9-11]", "n9 n10 n11"),
        ("r[1-2]n[1-2]-ib", "r1n1-ib r1n2-ib r2n1-ib r2n2-ib"),
        ("a,b[2],c", "a b2 c"),
        ("", ""),
    ],
)
def test_host_lists_are_expanded_as_by_slurm(text: str, hosts: str) -> None:
    assert expand_hosts(text) == hosts.split()


@pytest.mark.parametrize("text", ["n[1-999999999]", "r[1-99999]n[1-99999]"])
def test_an_excessive_host_list_is_refused_at_once(shell: Shell, text: str) -> None:
    with pytest.raises(UsageError, match="SLURM_STEP_NODELIST names more than 65536 hosts"):
        shell.load(variables={**STEP, "SLURM_STEP_NODELIST": text})
