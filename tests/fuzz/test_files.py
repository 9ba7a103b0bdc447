"""Files that the agent and its commands read again: state, caches, journals, what workers and frameworks wrote."""

from __future__ import annotations

import json
import os
import warnings
from pathlib import Path

import msgspec

from elastic_agent.agent import identity, run_claim
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.worker_group.script_scan import curated_imports, needs_own_python
from elastic_agent.client._cells import SLOT_BYTES, HeartbeatFile
from elastic_agent.doctor.interpreter import Installed, decoded
from elastic_agent.doctor.script import check_source
from elastic_agent.integrations import trainings
from elastic_agent.integrations.transformers.position import saved
from elastic_agent.linux import boot_id, pid_namespace
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import escaped
from elastic_agent.protocol import Plan
from elastic_agent.rendezvous.backends.c10d.job_files import _run_in
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.testing.records import Lines
from elastic_agent.workers.failure import describe
from elastic_agent.workers.output.tee import Follower
from tests.loop_thread import in_loop

from .damage import check_shown, fuzzed
from .samples import TRACEBACK, record_samples, statuses

SCRIPT = b"""\
import os, sys
import torch.distributed as dist
from setproctitle import setproctitle
os.environ["OMP_NUM_THREADS"] = "1"
os.environ.setdefault("MASTER_ADDR", "localhost")
if "RANK" not in os.environ:
    os.environ.update({"RANK": "0", "WORLD_SIZE": str(1 + 1)})
del os.environ["NCCL_DEBUG"]
local = int(os.environ["LOCAL_RANK"])
dist.init_process_group("gloo", rank=local, world_size=2)
"""
ENDPOINT = {
    "shown": "n0:29400",
    "backend": "c10d",
    "boot": boot_id(),
    "keys": ["c10d n0:29400"],
    "dial": ["n0", 29400],
}
IDENTITY = {
    "agent": 1,
    "namespace": pid_namespace(),
    "incarnation": "ab",
    "boot": boot_id(),
    "processes": [[2**22 + 1, 5]],
}
ERROR = {
    "message": "RuntimeError: boom\n\x1b[31mred",
    "errorCode": 1,
    "extraInfo": {"py_callstack": TRACEBACK, "timestamp": "1700000000"},
}
ATTRIBUTES = {"saved": {"step": 60, "world_size": 4}}
STEP = {"global_step": 60, "stateful_callbacks": {"ElasticCallback": {"attributes": ATTRIBUTES}}}
INSTALLED = Installed("3.11.2", {"torch": "2.13.0"}, "12.8", "2.27", "/usr/lib/libnccl.so", 4002)


def as_json(content: object) -> bytes:
    """A file of this content."""
    return json.dumps(content).encode()


def written(path: Path, data: bytes) -> Path:
    """Write it to this file, whose folder may be missing."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return path


@fuzzed(*map(msgspec.json.encode, statuses()))
def test_status(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / "status/run/n0.json", data)
    for status in saved_statuses(tmp_path):
        check_shown(escaped(status_text(status, 1.7e9), keep_lines=True))


@fuzzed(*record_samples()[Plan])
def test_history(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / f"runs/run.run/{7:016d}-{8:016d}-11.json", data)
    in_loop(RunHistoryStore(tmp_path).load("run"))


@fuzzed(b'{"run_id":"run-9040f03a"}')
def test_job(tmp_path: Path, data: bytes) -> None:
    _run_in(written(tmp_path / "job.json", data))


@fuzzed(as_json(IDENTITY))
def test_identity(tmp_path: Path, data: bytes) -> None:
    path = written(tmp_path / "n0.lock", data)
    check_shown(identity._holder(tmp_path, "n0"))
    with path.open("rb") as file:
        identity._proven_gone(file.fileno(), 0.0)


@fuzzed(as_json(ENDPOINT))
def test_claim(tmp_path: Path, data: bytes) -> None:
    own = run_claim.ClaimedEndpoint("n0:29400", "c10d", boot_id(), ["c10d n0:29400"], [])
    with written(tmp_path / "claim", data).open("rb") as file:
        found = run_claim._read(file.fileno())
    if found is not None:
        own.is_same(found)
        str(run_claim.RunElsewhereError(found, own))


@fuzzed(b'{"commands":["a1"],"scheduled":"100","requeues":1}')
def test_stop_request(tmp_path: Path, data: bytes) -> None:
    written(tmp_path / run_claim.STOP_FILE, data)
    run_claim._stop_request(tmp_path)


@fuzzed(b'{"boottime_s":9.5,"kind":"step","loss":0.5}\n{"boottime_s":9.25,"kind":"save"}\n')
def test_records(tmp_path: Path, data: bytes) -> None:
    Lines(written(tmp_path / "records.jsonl", data)).all()


@fuzzed(as_json({"message": ERROR}), as_json({"message": "boom"}))
def test_error(data: bytes) -> None:
    failure = describe(0, 1, data.decode(errors="replace"), "")
    check_shown(failure.summary("n0"))
    check_shown(failure.tail)


@fuzzed("\rstep 1\rstep 2\nGrüße ∀\nunfinished".encode())
def test_output(tmp_path: Path, data: bytes) -> None:
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
        beats, step = made.read(slot)
        msgspec.json.encode((beats, step, made.left(slot), made.handles_notices(slot)))
    made.close()


@fuzzed(as_json(STEP))
def test_trainer_state(tmp_path: Path, data: bytes) -> None:
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
            check_shown(escaped(finding.seen if hasattr(finding, "seen") else str(finding)))


@fuzzed(msgspec.json.encode(INSTALLED))
def test_interpreter(data: bytes) -> None:
    decoded(Installed, data)
