"""When and why workers of one generation failed, although their processes end later or are stopped meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.agent.worker_group.endings import has_not_saved, with_memory, worker_report
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.diagnosis.records import WorkerReport, WorkerState
from elastic_agent.exit_note import Note, Writer, exit_code
from elastic_agent.linux import boottime_s
from elastic_agent.workers.end import WorkerEnd
from tests.agent.support import clean_environment, run

# -- the note -------------------------------------------------------------------------------------


def noted(folder: Path, error: BaseException | None, slot: int = 1) -> Note | None:
    with closing(HeartbeatFile.create(folder, 2)) as file:
        Writer(file.path, slot).write(error, exit_code(error))
        assert file.read(0) == file.read(1) == (0, 0)
        assert file.note(1 - slot) is None
        return file.note(slot)


def raised(how: str) -> BaseException:
    try:
        exec(how)
    except BaseException as error:
        return error
    raise AssertionError(how)


@pytest.mark.parametrize(
    ("how", "code", "errors"),
    [
        ("raise ValueError('bad\\nbatch')", 1, ("ValueError: bad batch",)),
        ("raise SystemExit(3)", 3, ("",)),
        ("raise SystemExit", 0, ("",)),
        ("raise SystemExit('no data')", 1, ("no data",)),
        ("raise KeyboardInterrupt", None, ("KeyboardInterrupt",)),
        ("import subprocess\nraise subprocess.SubprocessError('x')", 1, ("subprocess.SubprocessError: x",)),
        ("try: 1 / 0\nexcept Exception: raise SystemExit(1)", 1, ("", "ZeroDivisionError: division by zero")),
        ("try: {}[2]\nexcept Exception: raise OSError from None", 1, ("OSError", "KeyError: 2")),
    ],
)  # fmt: skip
def test_a_note_tells_the_code_and_the_exceptions_also_hidden_ones(
    tmp_path: Path, how: str, code: int | None, errors: tuple[str, ...]
) -> None:
    before_s = boottime_s()
    note = noted(tmp_path, raised(how))
    assert note is not None
    assert (note.code, note.errors) == (code, errors)
    assert before_s - 1e-3 <= note.at_boottime_s <= boottime_s()


def test_a_process_that_a_worker_forks_writes_no_note_of_the_worker(tmp_path: Path) -> None:
    with closing(HeartbeatFile.create(tmp_path, 1)) as file:
        writer = Writer(file.path, 0)
        pid = os.fork()
        if pid == 0:
            writer.write(None, 0)
            os._exit(0)
        os.waitpid(pid, 0)
        assert file.note(0) is None


def test_an_immediate_exit_notes_its_code_and_the_exception_that_was_being_handled(tmp_path: Path) -> None:
    script = """
import os, sys
from elastic_agent.exit_note import Writer, note_immediate_exits
note_immediate_exits(Writer(sys.argv[1], 1))
child = os.fork()
if not child:
    os._exit(5)
os.waitpid(child, 0)
try:
    1 / 0
except ZeroDivisionError:
    os._exit(status=7)
"""
    with closing(HeartbeatFile.create(tmp_path, 2)) as file:
        done = subprocess.run(
            [sys.executable, "-c", script, file.path],
            env=clean_environment(),
            check=False,
            capture_output=True,
        )
        note = file.note(1)
    assert done.returncode == 7, done.stderr
    assert note is not None
    assert (note.code, note.errors) == (7, ("", "ZeroDivisionError: division by zero"))


# -- the report -----------------------------------------------------------------------------------


def reported(
    returncode: int, note: Note | None, stopped_s: float | None, *, step: int = 0, stderr: str = ""
) -> WorkerReport:
    """Return the report on a worker whose end the guard took for the stop's."""
    end = WorkerEnd(1, 0, 4711, returncode, 100.0, stderr, stopping=True, note=note, step=step)
    return worker_report(end, stopped_s, "")


def test_a_worker_that_is_stopped_while_it_ends_because_of_an_exception_has_failed() -> None:
    note = Note(99.8, 1, ("ValueError: bad batch",))
    report = reported(-signal.SIGTERM, note, 99.9, step=7, stderr="Epoch 1\n")
    assert (report.returncode, report.state, report.step) == (1, WorkerState.FAILED, 7)
    assert report.error == "ValueError: bad batch"
    assert report.failed_s == pytest.approx((report.ended_s or 0.0) - 0.2, abs=0.01)


def test_a_worker_whose_script_ends_because_of_the_stop_was_stopped() -> None:
    assert reported(-signal.SIGTERM, Note(99.95, 1, ("KeyError: 1",)), 99.9).state is WorkerState.STOPPED


def test_a_note_that_is_dated_after_the_end_of_its_worker_is_ignored(tmp_path: Path) -> None:
    with closing(HeartbeatFile.create(tmp_path, 1)) as file:
        Writer(file.path, 0).write(ValueError("bad batch"), 1)
        ends = [
            with_memory(WorkerEnd(1, 0, 4711, 1, at_s), file, ())
            for at_s in (boottime_s(), boottime_s() - 10)
        ]
    assert [end.failure().message for end in ends] == ["ValueError: bad batch", ""]


@pytest.mark.parametrize(("stopped_s", "state"), [(99.9, WorkerState.STOPPED), (100.1, WorkerState.FAILED)])
def test_a_worker_that_had_died_before_the_stop_was_killed_by_something_else(
    stopped_s: float, state: WorkerState
) -> None:
    assert reported(-signal.SIGKILL, None, stopped_s).state is state


@pytest.mark.parametrize(
    ("note", "is_named"),
    [
        (None, True),
        (Note(99.95, 0, ()), False),
        (Note(99.95, 0, ("",)), False),
        (Note(99.95, 1, ("OSError",)), True),
    ],
    ids=["script still runs", "script has ended", "exit code 0", "script has failed"],
)
def test_a_worker_that_is_killed_after_its_script_ended_in_order_may_have_saved(
    note: Note | None, is_named: bool
) -> None:
    assert has_not_saved(reported(-signal.SIGKILL, note, 99.9), signal.SIGTERM) is is_named


# -- all of it ------------------------------------------------------------------------------------

TWO_FAIL = """
import os, signal, sys, time
from pathlib import Path

mark = Path(sys.argv[1])
if os.environ["RANK"] == "1":
    class Slow:
        def __del__(self, touch=mark.touch, sleep=time.sleep):  # a process that needs long to end
            touch()
            sleep(1000)

    sys.kept = Slow()
    how = sys.argv[2]
    if how == "exception":
        raise ValueError("bad sample")
    sys.exit(3)
while not mark.exists():
    time.sleep(0.001)
os.kill(os.getpid(), signal.SIGKILL)
"""


@pytest.mark.parametrize(
    ("start", "how", "what"),
    [
        pytest.param("warm", "exit", "exited with code 3", marks=pytest.mark.prove),
        ("cold", "exception", "ValueError: bad sample"),
    ],
)
def test_of_two_failures_the_first_is_the_cause_although_its_process_lives_longer(
    tmp_path: Path, start: str, how: str, what: str
) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "0", "--worker-start", start)
    done = run(tmp_path, TWO_FAIL, *options, arguments=(str(tmp_path / "mark"), how))
    assert f"root cause: worker {os.uname().nodename}/1 (rank 1)" in done.stderr, done.stderr
    (line,) = [line for line in done.stderr.splitlines() if "root cause" in line]
    assert what in line
