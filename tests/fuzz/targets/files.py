"""Files that the agent and its commands read again: state, caches, journals, what workers and frameworks wrote."""

from __future__ import annotations

import contextlib
import io
import json
import os
from collections.abc import Callable
from pathlib import Path

import msgspec

from elastic_agent.agent import identity, run_claim
from elastic_agent.agent.reporting.status_files import saved_statuses
from elastic_agent.agent.worker_group.script_scan import curated_imports, needs_own_python
from elastic_agent.client._cells import SLOT_BYTES, HeartbeatFile
from elastic_agent.doctor import interpreter
from elastic_agent.doctor.interpreter import Installed, ask_interpreter
from elastic_agent.doctor.script import check_source, top_level_imports
from elastic_agent.integrations import trainings
from elastic_agent.integrations.transformers.checkpoints import saved
from elastic_agent.linux import boot_id, pid_namespace
from elastic_agent.monitoring.status_text import status_text
from elastic_agent.printable import escaped
from elastic_agent.protocol import History
from elastic_agent.rendezvous.backends.c10d.job_files import _run_in
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.testing.records import Lines
from elastic_agent.workers.failure import describe
from elastic_agent.workers.output.tee import Follower
from tests.fuzz.target import Target, check_shown
from tests.loop_thread import in_loop

from . import support

_SCRIPT = b"""\
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


def targets() -> list[Target]:
    """Each writes its input to a file in memory."""
    folder = support.Folder()

    def from_file(name: str, read: Callable[[os.PathLike[str]], object]) -> Callable[[bytes], object]:
        path = folder.write(name, b"")

        def feed(data: bytes) -> object:
            path.write_bytes(data)
            return read(path)

        return feed

    state = folder.path / "state"
    for kind in ("status/run", "runs/run.run"):
        (state / kind).mkdir(parents=True)
    return [
        Target(
            "file-status",
            tuple(map(msgspec.json.encode, support.statuses())),
            _status(state),
            ("agent/reporting/status_files.py _status_in",),
            0.2,
        ),
        Target("file-history", support.record_samples()[History], _history(state), weight=0.3),
        Target(
            "file-job",
            (b'{"run_id":"run-9040f03a"}',),
            from_file("job.json", _run_in),
            ("rendezvous/backends/c10d/job_files.py _run_in",),
            0.3,
        ),
        Target(
            "file-identity",
            (_identity(),),
            _lock(folder),
            ("agent/identity.py _holder", "agent/identity.py _proven_gone"),
            0.2,
        ),
        Target("file-claim", _claims(), _claim(folder), ("agent/run_claim.py _read",), 0.2),
        Target(
            "file-stop-request",
            (b'{"commands":["a1"],"scheduled":"100","requeues":1}',),
            from_file(run_claim.STOP_FILE, lambda path: run_claim._stop_request(Path(path).parent)),
            ("agent/run_claim.py _stop_request",),
            0.2,
        ),
        Target(
            "file-records",
            (b'{"boottime_s":9.5,"kind":"step","loss":0.5}\n{"boottime_s":9.25,"kind":"save"}\n',),
            from_file("records.jsonl", lambda path: Lines(Path(path)).all()),
            ("testing/records.py _decoded",),
            0.3,
        ),
        Target("file-error", _error_files(), _error_file, ("workers/failure.py _from_error_file",), 0.5),
        Target(
            "file-output",
            ("\rstep 1\rstep 2\nGrüße ∀\nunfinished".encode(),),
            from_file("output.log", _output),
            ("workers/output/tee.py Follower.advance",),
            0.3,
        ),
        Target("file-heartbeats", (bytes(128), b"\x01" * 256), _heartbeats(folder), weight=0.2),
        Target(
            "file-trainer-state",
            (_trainer_state(),),
            _trainer(folder),
            ("integrations/transformers/checkpoints.py trainer_state",),
            0.3,
        ),
        Target(
            "file-trainings",
            (
                b'{"several": false, "ended": true, "checkpoints": {"/c/a.ckpt": [12, 3], "/c/b.ckpt": [7, 4]}}',
            ),
            from_file("trainings.json", _trainings),
            ("integrations/trainings.py read",),
            0.1,
        ),
        Target(
            "script",
            (_SCRIPT,),
            from_file("train.py", _script),
            (
                "agent/worker_group/script_scan.py _parsed",
                "doctor/script.py check_source",
                "doctor/script.py top_level_imports",
            ),
            slow_s=0.5,
            weight=0.1,
        ),
        Target(
            "interpreter",
            (_installed(),),
            _interpreter,
            ("doctor/interpreter.py ask_interpreter",),
            0.3,
            folder.close,
        ),
    ]


def _status(state: os.PathLike[str]) -> Callable[[bytes], None]:
    path = support.Path(state) / "status/run/n0.json"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        for one in saved_statuses(support.Path(state)):
            check_shown(escaped(status_text(one, 1.7e9), keep_lines=True))

    return feed


def _history(state: os.PathLike[str]) -> Callable[[bytes], None]:
    store = RunHistoryStore(support.Path(state))
    path = support.Path(state) / f"runs/run.run/{7:016d}-{8:016d}-11.json"

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        in_loop(store.load("run"))

    return feed


def _identity() -> bytes:
    body = {
        "agent": 1,
        "namespace": pid_namespace(),
        "incarnation": "ab",
        "boot": boot_id(),
        "processes": [[2**22 + 1, 5]],
    }
    return json.dumps(body).encode()


def _lock(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("n0.lock", b"")

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        check_shown(identity._holder(folder.path, "n0"))
        handle = os.open(path, os.O_RDONLY)
        try:
            identity._proven_gone(handle, 0.0)
        finally:
            os.close(handle)

    return feed


def _claims() -> tuple[bytes, ...]:
    claims = (
        {
            "shown": "n0:29400",
            "backend": "c10d",
            "boot": boot_id(),
            "keys": ["c10d n0:29400"],
            "dial": ["n0", 29400],
        },
    )
    return tuple(json.dumps(one).encode() for one in claims)


def _claim(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("claim", b"")
    own = run_claim.ClaimedEndpoint("n0:29400", "c10d", boot_id(), ["c10d n0:29400"], [])

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        handle = os.open(path, os.O_RDONLY)
        try:
            found = run_claim._read(handle)
        finally:
            os.close(handle)
        if found is not None:
            own.is_same(found)
            str(run_claim.RunElsewhereError(found, own))

    return feed


def _error_files() -> tuple[bytes, ...]:
    extra = {"py_callstack": support.TRACEBACK, "timestamp": "1700000000"}
    full = {"message": {"message": "RuntimeError: boom\n\x1b[31mred", "errorCode": 1, "extraInfo": extra}}
    return json.dumps(full).encode(), json.dumps({"message": "boom"}).encode()


def _error_file(data: bytes) -> None:
    failure = describe(0, 1, data.decode(errors="replace"), "")
    check_shown(failure.summary("n0"))
    check_shown(failure.tail)


def _heartbeats(folder: support.Folder) -> Callable[[bytes], None]:
    made = HeartbeatFile.create(folder.path, 2)

    def feed(data: bytes) -> None:
        made._memory[:] = data[: 2 * SLOT_BYTES].ljust(2 * SLOT_BYTES, b"\x00")
        for slot in range(2):
            note = made.note(slot)
            if note is not None:
                msgspec.json.encode((note.at_boottime_s, note.code, note.errors))
            beats, step = made.read(slot)
            msgspec.json.encode((beats, step, made.left(slot), made.handles_notices(slot)))

    return feed


def _trainer_state() -> bytes:
    attributes = {"saved": {"step": 60, "world_size": 4}}
    return json.dumps(
        {"global_step": 60, "stateful_callbacks": {"ElasticCallback": {"attributes": attributes}}}
    ).encode()


def _trainer(folder: support.Folder) -> Callable[[bytes], None]:
    path = folder.write("trainer_state.json", b"")

    def feed(data: bytes) -> None:
        path.write_bytes(data)
        saved(folder.path)

    return feed


def _trainings(path: os.PathLike[str]) -> None:
    with contextlib.redirect_stderr(io.StringIO()):  # it says that a record is damaged
        trainings.read(os.path.dirname(path))


def _output(path: os.PathLike[str]) -> None:
    lines: list[str] = []
    follower = Follower(os.fspath(path), "[0]:", lambda header, line: lines.append(header + line))
    follower.advance(1.0, ends=True)
    follower.close()
    assert not any("\n" in line for line in lines)


def _script(path: os.PathLike[str]) -> None:
    needs_own_python(str(path), is_module=False, folder="/", environ={})
    curated_imports(str(path), is_module=False, folder="/")
    source = support.Path(path).read_bytes()
    for finding in check_source(source, "train.py"):
        check_shown(escaped(finding.seen if hasattr(finding, "seen") else str(finding)))
    top_level_imports(source)


def _installed() -> bytes:
    installed = Installed(
        "3.11.2", {"torch": "2.13.0"}, "ab", ("numpy",), "12.8", "2.27", "/usr/lib/libnccl.so"
    )
    return msgspec.json.encode(installed)


class _Answer:
    stderr = b"Traceback\nModuleNotFoundError: torch"
    returncode = 1

    def __init__(self, data: bytes) -> None:
        self.stdout = data


class _Subprocess:
    """An interpreter that answers with this."""

    DEVNULL, TimeoutExpired = interpreter.subprocess.DEVNULL, interpreter.subprocess.TimeoutExpired

    def __init__(self, data: bytes) -> None:
        self._data = data

    def run(self, *_: object, **__: object) -> _Answer:
        return _Answer(self._data)


def _interpreter(data: bytes) -> None:
    original, interpreter.subprocess = interpreter.subprocess, _Subprocess(data)  # type: ignore[assignment]
    try:
        ask_interpreter("python", "/", ["numpy"])
    finally:
        interpreter.subprocess = original
