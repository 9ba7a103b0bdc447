"""What users, their systems, workers and former agents of this machine give: texts and files, damaged or not."""

from __future__ import annotations

import contextlib
import json
import os
import warnings
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import msgspec

from elastic_agent import linux
from elastic_agent.agent.identity import acquire_node_id
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.run_claim import Claim, OtherRunError
from elastic_agent.agent.slurm.job import parse_facts
from elastic_agent.agent.worker_group.script_scan import curated_imports, needs_own_python
from elastic_agent.client._cells import SLOT_BYTES, HeartbeatFile
from elastic_agent.client._environment import MalformedEnvironmentError, read_worker
from elastic_agent.config.errors import BadValueError, UsageError, quoted
from elastic_agent.config.load import load_settings
from elastic_agent.config.secrets import run_secret
from elastic_agent.config.settings import specs
from elastic_agent.config.sources.command_line import HelpRequested, VersionRequested
from elastic_agent.config.sources.slurm import expand_hosts
from elastic_agent.diagnosis.known_errors import known_error, possible_error, readable
from elastic_agent.doctor.local import check_source
from elastic_agent.integrations import trainings
from elastic_agent.integrations.transformers.position import saved
from elastic_agent.logs.render import console_line, journal_lines, json_line
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import escaped, json_text, plain, without_surrogates
from elastic_agent.protocol import Plan
from elastic_agent.rendezvous.run_history import JobFiles, RunHistoryStore
from elastic_agent.values import MOST_NODES
from elastic_agent.workers.failure import describe
from elastic_agent.workers.output.tee import Follower
from tests.loop_thread import in_loop

from .damage import check_shown, fuzzed
from .samples import OTHER_ERRORS, TRACEBACK, record_samples, statuses

TOML = b"""\
nnodes = "1:4"
nproc-per-node = 8
rdzv_endpoint = "n0:29400"
rdzv_conf = {timeout = 60, is_host = true}
duplicate_stdout_filters = ["a", "b"]
script_args = ["--epochs", "90"]
"""
VALUES = (
    "1:4 8 auto n0:29400 [::1]:29400,[fe80::1]:1,n3 127.0.0.1 0.5 1e3 500M 2GiB true no 29400:29500 etcd c10d "
    "/team/agent TERM,INT 0:3,1:1 a=1,timeout=60 numpy,torch /tmp/x"
)
ARGV = (
    b"--nnodes\n1:4\n--rdzv-endpoint=n0:29400\n-t\n3\n--rdzv-conf\ntimeout=5,is_host=1,cacert=/a=b\n-m\nhttp"
)
VARIABLES = (
    b"PET_NNODES=1:4\nELASTIC_AGENT_LEASE_TTL=5\nSLURM_JOB_ID=4711\nSLURM_STEP_ID=0\nSLURM_STEP_NODELIST=n[1-4]\n"
    b"SLURM_LOCALID=0\nSLURM_GPUS_ON_NODE=8\nSLURM_ARRAY_JOB_ID=4700\nSLURM_ARRAY_TASK_ID=3\nSTATE_DIRECTORY=/a:/b"
)
WORKER = (
    b"RANK=3\nWORLD_SIZE=8\nLOCAL_RANK=1\nLOCAL_WORLD_SIZE=2\nGROUP_RANK=1\nGROUP_WORLD_SIZE=4\n"
    b"ELASTIC_AGENT_GENERATION=2\nELASTIC_AGENT_RESTARTS=1\nELASTIC_AGENT_FIRST_GENERATION=1\n"
    b"ELASTIC_AGENT_RUN_ID=run\nELASTIC_AGENT_NODE_ID=n0\nELASTIC_AGENT_SLOT=1\nELASTIC_AGENT_INCARNATION=ab"
)
SCRIPT = b"""\
import os, sys
import torch.distributed as dist
os.environ["OMP_NUM_THREADS"] = "1"
if "RANK" not in os.environ:
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(1 + 1)})
dist.init_process_group("gloo", rank=int(os.environ["LOCAL_RANK"]), world_size=2)
"""
LOCK = {
    "incarnation": "ab",
    "boot": linux.boot_id(),
    "namespace": linux.pid_namespace(),
    "processes": [[2**22 + 1, 5]],
}
CLAIM = Claim("n0:29400", ["c10d n0:29400"], linux.boot_id(), os.getpid(), linux.pid_namespace(), "train.py")
ATTRIBUTES = {"saved": {"step": 60, "world_size": 4}}
STEP = {"global_step": 60, "stateful_callbacks": {"ElasticCallback": {"attributes": ATTRIBUTES}}}
ERROR = {
    "message": "RuntimeError: boom\n\x1b[31mred",
    "errorCode": 1,
    "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1700000000"},
}
SHOWN = (b"\x1b]0;title\x07\x1b[31mred\x1b[0m\ttab\nline \xe2\x80\xae", "é\u009b31m\u2028".encode())
LONG_LINES = (b"Rank 2" + b"9" * 40_000, b"pair.cc:534] " * 4000, b"TCPStore.cpp:106] " * 4000)


def written(path: Path, data: bytes) -> Path:
    """Write it to this file, whose folder may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


def as_text(data: bytes) -> str:
    """As the system hands texts over: bytes that are no UTF-8 as surrogates, and never NUL."""
    return os.fsdecode(data.replace(b"\x00", b""))


def as_variables(data: bytes) -> dict[str, str]:
    """An environment, one variable in each line."""
    pairs = (line.partition("=") for line in as_text(data).split("\n"))
    return {name: value for name, equals, value in pairs if name and equals}


def used_or_refused(work: Callable[[], object]) -> None:
    """Run it; an error of the user is one line without control characters."""
    refusal = "none"
    try:
        work()
    except (HelpRequested, VersionRequested):
        pass
    except UsageError as problem:
        refusal = str(problem)
    check_shown(refusal)
    assert refusal
    assert "\n" not in refusal


@fuzzed(*VALUES.encode().split(), b"9" * 50_000 + b"x", b"//a:" * 20_000 + b"secret@host")
def test_value_of_a_setting(data: bytes) -> None:
    text = as_text(data)
    for spec in specs():
        try:
            value = spec.kind.parse(text)
        except BadValueError as bad:
            check_shown(f"{bad.wrong} {bad.hint}")
        else:
            assert not isinstance(value, float) or 0 <= value < float("inf"), spec.name
            spec.kind.show(value)
    check_shown(quoted(text))


@fuzzed(TOML, b"max_restarts = " + b"9" * 5000)
def test_settings_file(tmp_path: Path, data: bytes) -> None:
    file = written(tmp_path / "agent.toml", data)
    used_or_refused(lambda: load_settings(["--config", str(file), "-m", "http"], {"HOME": str(tmp_path)}))


@fuzzed(ARGV)
def test_command_line(tmp_path: Path, data: bytes) -> None:
    used_or_refused(lambda: load_settings(as_text(data).split("\n"), {"HOME": str(tmp_path)}))


@fuzzed(VARIABLES)
def test_variables(tmp_path: Path, data: bytes) -> None:
    used_or_refused(lambda: load_settings(["-m", "http"], {**as_variables(data), "HOME": str(tmp_path)}))


@fuzzed(b"n[001-003,7],login", b"[1]" * 3000, b"n[" + b"9" * 5000 + b"-1]", b"[1-99999]" + b"x" * 70_000)
def test_hosts_of_slurm(data: bytes) -> None:
    with contextlib.suppress(ValueError):
        assert len(expand_hosts(as_text(data))) <= MOST_NODES


@fuzzed(b"NodeName=n1 Arch=x86_64 NodeAddr=10.0.0.1 NodeHostName=n1 State=IDLE+DRAIN Comment=x\n")
def test_node_of_slurm(data: bytes) -> None:
    parse_facts(data.decode(errors="replace"), "NodeAddr", "NodeHostName")


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


@fuzzed(WORKER, b"RANK=0")
def test_variables_of_a_worker(data: bytes) -> None:
    refusal = ""
    try:
        read_worker(as_variables(data))
    except MalformedEnvironmentError as problem:
        refusal = str(problem)
    assert "\n" not in refusal


# -- files ----------------------------------------------------------------------------------------


@fuzzed(*map(msgspec.json.encode, statuses()))
def test_saved_status(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / "status/run/n0.json", data)
    for status in saved_statuses(tmp_path):
        check_shown(escaped(status_text(status, 1.7e9), keep_lines=True))


@fuzzed(*record_samples()[Plan])
def test_history(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / f"runs/run.run/{7:016d}-{8:016d}-11.json", data)
    in_loop(RunHistoryStore(tmp_path).load("run"))


@fuzzed(b'{"run_id":"run-9040f03a"}', b'{"run_id":"\xff"}')
def test_file_of_a_job(tmp_path: Path, data: bytes) -> None:
    files = JobFiles(tmp_path)
    files.write("job", "run-9040f03a")
    (file,) = (tmp_path / "jobs").iterdir()
    written(file, data)
    files.run_of("job")


@fuzzed(json.dumps(LOCK).encode(), json.dumps(LOCK).replace("4194305", "1e999").encode())
def test_lock_of_a_node_id(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / "n0.lock", data)
    acquire_node_id(tmp_path, "n0", wait_s=0.0).release()


@fuzzed(msgspec.json.encode(CLAIM))
def test_claim_of_a_run(tmp_path: Path, data: bytes) -> None:
    held = CLAIM.take(tmp_path)
    try:
        (file,) = tmp_path.iterdir()
        written(file, data)
        with contextlib.suppress(OtherRunError):
            os.close(CLAIM.take(tmp_path))
    finally:
        os.close(held)


@fuzzed(json.dumps({"message": ERROR}).encode(), b'{"message": "boom"}')
def test_error_file(data: bytes) -> None:
    failure = describe(0, 1, data.decode(errors="replace"), "")
    check_shown(failure.summary("n0"))
    check_shown(failure.tail)


@fuzzed(TRACEBACK.encode(), OTHER_ERRORS.encode(), *LONG_LINES)
def test_standard_error_of_a_worker(data: bytes) -> None:
    text = data.decode(errors="replace")  # as the guard reads it
    for code in (1, -6, -9, -15):
        failure = describe(0, code, "", text)
        for shown in (failure.summary("n0"), failure.tail, failure.message):
            check_shown(shown)
    known_error(text, text)
    possible_error(text)
    readable(text)


@fuzzed("\rstep 1\rstep 2\nGrüße ∀\nunfinished".encode())
def test_output_of_a_worker(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "output.log", data)
    lines: list[str] = []
    follower = Follower(os.fspath(path), "[0]:", lambda header, line: lines.append(header + line))
    follower.advance(1.0, ends=True)
    follower.close()
    assert not any("\n" in line for line in lines)


@fuzzed(bytes(128), b"\x01" * 256)
def test_heartbeats(tmp_path: Path, data: bytes) -> None:
    made = HeartbeatFile.create(tmp_path, 2)
    made._memory[:] = data[: 2 * SLOT_BYTES].ljust(2 * SLOT_BYTES, b"\x00")
    for slot in range(2):
        note = made.note(slot)
        if note is not None:
            msgspec.json.encode((note.at_boottime_s, note.code, note.errors))
        msgspec.json.encode((*made.read(slot), made.left(slot), made.handles_notices(slot)))
    made.close()


@fuzzed(json.dumps(STEP).encode())
def test_state_of_a_trainer(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / "trainer_state.json", data)
    saved(tmp_path)


@fuzzed(b'{"several": false, "ended": true, "checkpoints": {"/c/a.ckpt": [12, 3], "/c/b.ckpt": [7, 4]}}')
def test_trainings(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / "trainings.json", data)
    trainings.read(os.fspath(tmp_path))


@fuzzed(SCRIPT, nested=False)  # very deep sources leave Python's own parser unusable, which pytest needs
def test_script(tmp_path: Path, data: bytes) -> None:
    path = os.fspath(written(tmp_path / "train.py", data))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", SyntaxWarning)
        needs_own_python(path, is_module=False, folder="/", environ={})
        curated_imports(path, is_module=False, folder="/")
        for finding in check_source(data, "train.py"):
            check_shown(escaped(str(finding)))


# -- what the kernel shows, of which programs choose the names ----------------------------------------


@fuzzed(b"python", b"a) S 1 (b")
def test_name_of_a_process(data: bytes) -> None:
    name = data.replace(b"\x00", b"")[:15]  # what the kernel takes
    numbers = b") S 1 4711 4711 0 -1 4194560 100 0 0 0 5 3 0 0 20 0 1 0 123456 1000 10 18446744073709551615"
    with mock.patch.object(linux, "_read", return_value=b"4711 (" + name + numbers):
        process = linux.read_process(4711)
    assert process is not None
    assert (process.parent, process.group, process.start_ticks) == (1, 4711, 123456)


@fuzzed(b"/user.slice/a.service", "/a\x1eb\u2028c".encode())
def test_name_of_a_cgroup(data: bytes) -> None:
    name = data.replace(b"\x00", b"").replace(b"\n", b"")
    with mock.patch.object(linux, "_read", return_value=b"0::/" + name + b"\n"):
        assert linux.cgroups() == {"": f"/{os.fsdecode(name)}"}


@fuzzed(*SHOWN)
def test_text_that_is_shown(data: bytes) -> None:
    """Bytes are read as surrogates, as Python does with file names."""
    text = data.decode(errors="surrogateescape")
    for shown in (plain(text), escaped(text, keep_lines=True), escaped(text), json_text({text: [text]})):
        check_shown(shown)
    without_surrogates(text).encode()
    named = {"run": "run", "node": text, "generation": 1, "what": text, "x": [text]}
    fields = {"time": 1.7e9, "level": "info", "event": text, **named}
    for shown in (json_line(fields), console_line(fields, colours=False), journal_lines(fields)):
        check_shown(shown)
