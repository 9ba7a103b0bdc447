"""What users and their systems give: command lines, variables, files, secrets, Slurm's variables and answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from elastic_agent.agent.slurm.nodes import parse_node
from elastic_agent.client._environment import MalformedEnvironmentError, read_worker
from elastic_agent.config.errors import BadValueError, UsageError, quoted
from elastic_agent.config.secrets import run_secret
from elastic_agent.config.settings import specs
from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.sources.command_line import HelpRequested, VersionRequested, parse_command_line
from elastic_agent.config.sources.environment import doubtful_variables, read_environment
from elastic_agent.config.sources.rdzv_conf import expand
from elastic_agent.config.sources.slurm import expand_hosts, slurm
from elastic_agent.config.sources.toml_file import read_settings_file
from elastic_agent.values import MOST_NODES

from .damage import check_shown, fuzzed

SOURCE = Source(Layer.FILE, "fuzz")
TOML = b"""\
nnodes = "1:4"
nproc-per-node = 8
rdzv_endpoint = "n0:29400"
lease-ttl = 5.0
rdzv_conf = {timeout = 60, is_host = true}
duplicate_stdout_filters = ["a", "b"]
script = "train.py"
script_args = ["--epochs", "90"]
"""
VALUES = (
    "1:4 8 auto n0:29400 [::1]:29400,[fe80::1]:1,n3 127.0.0.1 0.5 1e3 500M 2GiB true no 29400:29500 etcd c10d "
    "/team/agent TERM,INT 0:3,1:1 a=1,timeout=60 numpy,torch /tmp/x"
)
ARGV = (
    "--nnodes 1:4 --rdzv-endpoint=n0:29400 --nproc_per_node 2 -t 3 --rdzv-conf timeout=5 train.py --epochs 90"
)
SLURM = (
    "SLURM_JOB_ID=4711 SLURM_STEP_ID=0 SLURM_STEP_NODELIST=n[1-4] SLURMD_NODENAME=n1 SLURM_NODEID=0 SLURM_LOCALID=0 "
    "SLURM_GPUS_ON_NODE=8 SLURM_ARRAY_JOB_ID=4700 SLURM_ARRAY_TASK_ID=3 SLURM_CLUSTER_NAME=lab"
)
WORKER = (
    "RANK=3 WORLD_SIZE=8 LOCAL_RANK=1 LOCAL_WORLD_SIZE=2 GROUP_RANK=1 GROUP_WORLD_SIZE=4 ELASTIC_AGENT_GENERATION=2 "
    "ELASTIC_AGENT_RESTARTS=1 ELASTIC_AGENT_FIRST_GENERATION=1 ELASTIC_AGENT_RUN_ID=run ELASTIC_AGENT_NODE_ID=n0 "
    "ELASTIC_AGENT_SLOT=1 ELASTIC_AGENT_INCARNATION=ab"
)
KINDS = list({id(spec.kind): spec for spec in specs()}.values())
"""A setting of each kind."""


def lines(words: str) -> bytes:
    """One word in each line."""
    return "\n".join(words.split()).encode()


def as_text(data: bytes) -> str:
    """As the system hands texts over: bytes that are no UTF-8 as surrogates, and never NUL."""
    return os.fsdecode(data.replace(b"\x00", b""))


def as_variables(data: bytes) -> dict[str, str]:
    """An environment, one variable in each line."""
    pairs = (line.partition("=") for line in as_text(data).split("\n"))
    return {name: value for name, equals, value in pairs if name and equals}


def used_or_refused(work: Callable[[], object]) -> None:
    """Run it; an error of the user is one line without control characters."""
    try:
        work()
    except (HelpRequested, VersionRequested):
        pass
    except UsageError as problem:
        text = str(problem)
        check_shown(text)
        assert text
        assert "\n" not in text


@fuzzed(*VALUES.encode().split())
def test_value(data: bytes) -> None:
    text = as_text(data)
    for spec in KINDS:
        try:
            value = spec.kind.parse(text)
        except BadValueError as bad:
            check_shown(f"{bad.wrong} {bad.hint}")
        else:
            assert not isinstance(value, float) or 0 <= value < float("inf"), spec.name
            spec.kind.show(value)
    check_shown(quoted(text))


@fuzzed(TOML)
def test_settings_file(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "agent.toml"
    path.write_bytes(data)
    used_or_refused(lambda: read_settings_file(path, SOURCE))


@fuzzed(lines(ARGV))
def test_command_line(data: bytes) -> None:
    used_or_refused(lambda: parse_command_line(as_text(data).split("\n")))


@fuzzed(b"PET_NNODES=1:4\nELASTIC_AGENT_LEASE_TTL=5")
def test_variables(data: bytes) -> None:
    read_environment(as_variables(data))
    doubtful_variables(as_variables(data))


@fuzzed(b"timeout=60,is_host=true,lease_ttl=5", b"join_timeout = 1 , cacert=/a=b")
def test_rdzv_conf(data: bytes) -> None:
    try:
        used_or_refused(lambda: expand(Given(as_text(data), SOURCE)))
    except BadValueError as bad:  # which the setting itself is refused with before
        check_shown(f"{bad.wrong} {bad.hint}")


@fuzzed(b"a" * 64 + b"\n", b"a" * 64 + b"\n" + b"b" * 64 + b"\n")
def test_secret(tmp_path: Path, data: bytes) -> None:
    def check(secrets: tuple[bytes, ...]) -> None:
        assert all(len(secret) >= 16 for secret in secrets)
        assert len(secrets) <= 2

    path = tmp_path / "run.secret"
    path.touch(0o600)
    path.write_bytes(data)
    used_or_refused(lambda: check(run_secret(path, {}, None)))
    used_or_refused(lambda: check(run_secret(None, {}, as_text(data))))


@fuzzed(lines(SLURM))
def test_variables_of_slurm(data: bytes) -> None:
    used_or_refused(lambda: slurm(as_variables(data)))


@fuzzed(b"n[001-003,7],login", b"gpu[1-2]-rack[3,5-6],a", b"n1")
def test_hosts_of_slurm(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert len(expand_hosts(as_text(data))) <= MOST_NODES


@fuzzed(b"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 State=IDLE+DRAIN Comment=x\n")
def test_node_of_slurm(data: bytes) -> None:
    parse_node(data.decode(errors="replace"))


@fuzzed(lines(WORKER), b"RANK=0")
def test_variables_of_a_worker(data: bytes) -> None:
    refusal = ""
    try:
        read_worker(as_variables(data))
    except MalformedEnvironmentError as problem:
        refusal = str(problem)
    assert "\n" not in refusal
