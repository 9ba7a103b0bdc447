"""What users and their systems give: command lines, variables, files, secrets, Slurm's variables and answers."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable
from pathlib import Path

from elastic_agent.agent.slurm.nodes import parse_node
from elastic_agent.client._environment import MalformedEnvironmentError, read_worker
from elastic_agent.config.errors import BadValueError, UsageError, quoted
from elastic_agent.config.etcd_password import read_password_file
from elastic_agent.config.run_secret import run_secret
from elastic_agent.config.settings import specs
from elastic_agent.config.sources.base import Given, Layer, Source
from elastic_agent.config.sources.command_line import HelpRequested, VersionRequested, parse_command_line
from elastic_agent.config.sources.environment import doubtful_variables, read_environment
from elastic_agent.config.sources.rdzv_conf import expand
from elastic_agent.config.sources.slurm import expand_hosts, slurm
from elastic_agent.config.sources.toml_file import read_settings_file
from elastic_agent.values import MOST_NODES
from tests.fuzz.target import Target, ViolationError, check_shown

from . import support

_SOURCE = Source(Layer.FILE, "fuzz")
_TOML = b"""\
nnodes = "1:4"
nproc-per-node = 8
rdzv_endpoint = "n0:29400"
lease-ttl = 5.0
rdzv_conf = {timeout = 60, is_host = true}
duplicate_stdout_filters = ["a", "b"]
script = "train.py"
script_args = ["--epochs", "90"]
"""
_HOSTS = (b"n[001-003,7],login", b"gpu[1-2]-rack[3,5-6],a", b"n1")
_VALUES = (
    b"1:4",
    b"8",
    b"auto",
    b"n0:29400",
    b"[::1]:29400,[fe80::1]:1,n3",
    b"127.0.0.1",
    b"0.5",
    b"1e3",
    b"500M",
    b"2GiB",
    b"true",
    b"no",
    b"29400:29500",
    b"etcd",
    b"c10d",
    b"/team/agent",
    b"TERM,INT",
    b"0:3,1:1",
    b"a=1,timeout=60",
    b"numpy,torch",
    b"/tmp/x",
)
_SLURM = {
    "SLURM_JOB_ID": "4711",
    "SLURM_STEP_ID": "0",
    "SLURM_STEP_NODELIST": "n[1-4]",
    "SLURMD_NODENAME": "n1",
    "SLURM_NODEID": "0",
    "SLURM_LOCALID": "0",
    "SLURM_GPUS_ON_NODE": "8",
    "SLURM_ARRAY_JOB_ID": "4700",
    "SLURM_ARRAY_TASK_ID": "3",
    "SLURM_CLUSTER_NAME": "lab",
}
_WORKER = {
    "RANK": "3",
    "WORLD_SIZE": "8",
    "LOCAL_RANK": "1",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "GROUP_WORLD_SIZE": "4",
    "ELASTIC_AGENT_GENERATION": "2",
    "ELASTIC_AGENT_RESTARTS": "1",
    "ELASTIC_AGENT_FIRST_GENERATION": "1",
    "ELASTIC_AGENT_RUN_ID": "run",
    "ELASTIC_AGENT_NODE_ID": "n0",
    "ELASTIC_AGENT_SLOT": "1",
    "ELASTIC_AGENT_INCARNATION": "ab",
}

_MANY_S = 1.0
"""A list may name 65,536 hosts."""
_KINDS = list({id(spec.kind): spec for spec in specs()}.values())
"""A setting of each kind."""


def targets() -> list[Target]:
    """Texts reach the agent as the system hands them over: bytes that are no UTF-8 as surrogates, and never NUL."""
    folder = support.Folder()
    return [
        Target("settings-value", _VALUES, _value, weight=0.2),
        Target("settings-toml", (_TOML,), _toml(folder), ("config/sources/toml_file.py _load",), 0.2),
        Target("settings-argv", (_argv(),), _command_line, weight=0.1, slow_s=_MANY_S),
        Target(
            "settings-environ",
            (_environ({"PET_NNODES": "1:4", "ELASTIC_AGENT_LEASE_TTL": "5"}),),
            _environment,
            weight=0.05,
        ),
        Target(
            "settings-rdzv-conf",
            (b"timeout=60,is_host=true,lease_ttl=5", b"join_timeout = 1 , cacert=/a=b"),
            _conf,
            weight=0.5,
        ),
        Target(
            "secret", (b"a" * 64 + b"\n", b"a" * 64 + b"\n" + b"b" * 64 + b"\n"), _secret(folder), weight=0.3
        ),
        Target("etcd-password", (b"hunter2\n",), _password(folder), weight=0.2),
        Target("slurm-variables", (_environ(_SLURM),), _slurm, weight=0.1, slow_s=_MANY_S),
        Target("slurm-hosts", _HOSTS, _hosts, weight=0.1, slow_s=_MANY_S),
        Target(
            "slurm-node",
            (b"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 State=IDLE+DRAIN Comment=x\n",),
            _node,
            weight=0.5,
        ),
        Target(
            "worker-environ",
            (_environ(_WORKER), _environ({"RANK": "0"})),
            _worker,
            weight=0.5,
            close=folder.close,
        ),
    ]


def _text(data: bytes) -> str:
    return os.fsdecode(data.replace(b"\x00", b""))


def _environ(variables: dict[str, str]) -> bytes:
    return b"\n".join(f"{name}={value}".encode() for name, value in variables.items())


def _variables(data: bytes) -> dict[str, str]:
    pairs = (line.partition("=") for line in _text(data).split("\n"))
    return {name: value for name, equals, value in pairs if name and equals}


def _argv() -> bytes:
    words = "--nnodes 1:4 --rdzv-endpoint=n0:29400 --nproc_per_node 2 -t 3 --rdzv-conf timeout=5 train.py --epochs 90"
    return b"\n".join(words.encode().split())


def _refused(work: Callable[[], object]) -> None:
    """Run it; an error of the user is one line without control characters."""
    try:
        work()
    except (HelpRequested, VersionRequested):
        pass
    except UsageError as problem:
        text = str(problem)
        check_shown(text)
        if "\n" in text or not text:
            raise ViolationError(f"not one line: {text!r}") from None


def _value(data: bytes) -> None:
    """Every kind of value."""
    text = _text(data)
    for spec in _KINDS:
        try:
            value = spec.kind.parse(text)
        except BadValueError as bad:
            check_shown(f"{bad.wrong} {bad.hint}")
        else:
            if isinstance(value, float) and not 0 <= value < float("inf"):
                raise ViolationError(f"{spec.name}: {value}")
            spec.kind.show(value)
    check_shown(quoted(text))


def _toml(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("agent.toml", b"")

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        _refused(lambda: read_settings_file(path, _SOURCE))

    return feed


def _command_line(data: bytes) -> None:
    _refused(lambda: parse_command_line(_text(data).split("\n")))


def _environment(data: bytes) -> None:
    variables = _variables(data)
    read_environment(variables)
    doubtful_variables(variables)


def _conf(data: bytes) -> None:
    try:
        _refused(lambda: expand(Given(_text(data), _SOURCE)))
    except BadValueError as bad:  # which the setting itself is refused with before
        check_shown(f"{bad.wrong} {bad.hint}")


def _secret(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("run.secret", b"")
    path.chmod(0o600)

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        _refused(lambda: _usable(run_secret(path, {}, None)))
        _refused(lambda: _usable(run_secret(None, {}, _text(data))))

    return feed


def _usable(secrets: tuple[bytes, ...]) -> None:
    if any(len(one) < 16 for one in secrets) or len(secrets) > 2:
        raise ViolationError(f"{secrets!r} is no secret")


def _password(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("password", b"")

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        with contextlib.suppress(UnicodeDecodeError):
            read_password_file(Path(path))

    return feed


def _slurm(data: bytes) -> None:
    _refused(lambda: slurm(_variables(data)))


def _hosts(data: bytes) -> None:
    try:
        hosts = expand_hosts(_text(data))
    except ValueError:
        return
    if len(hosts) > MOST_NODES:
        raise ViolationError(f"{len(hosts)} hosts")


def _node(data: bytes) -> None:
    parse_node(data.decode(errors="replace"))


def _worker(data: bytes) -> None:
    try:
        read_worker(_variables(data))
    except MalformedEnvironmentError as problem:
        if "\n" in str(problem):
            raise ViolationError(f"not one line: {problem}") from None
