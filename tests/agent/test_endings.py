"""When and why workers of one generation failed, although their processes end later or are stopped meanwhile."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.agent import events
from elastic_agent.agent.worker_group.endings import Remains, has_not_saved, read_ends
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.diagnosis.records import WorkerState
from elastic_agent.exit_note import Note, Writer, exit_code
from elastic_agent.linux import boottime_s
from elastic_agent.workers.failure import WorkerFailure, describe
from elastic_agent.workers.guard.client import Exited
from elastic_agent.workers.output.final_output import FinalOutput
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


class Context:
    """What is known of one worker."""

    generation = 1

    def __init__(self, exit_: Exited, stderr: str) -> None:
        self.exits = {exit_.slot: exit_}
        self._stderr = stderr

    def final_output(self, slot: int) -> FinalOutput:
        return FinalOutput()

    def failure(self, event: Exited, words: FinalOutput, noted: str = "") -> WorkerFailure:
        return describe(event.slot, event.returncode, "", self._stderr, noted=noted)

    def output_file(self, slot: int) -> str:
        return ""

    def shows_stderr(self, slot: int) -> bool:
        return True

    def machine_facts(self) -> Mapping[str, str]:
        return {}


def reported(exit_: Exited, left: Remains, stopped_s: float | None, stderr: str = "") -> events.WorkerEnd:
    (end,) = read_ends(Context(exit_, stderr), {0: left}, {}, stopped_s).workers  # type: ignore[arg-type]
    assert end.report.failed_s is not None
    return end


def exited(returncode: int, *, stopping: bool) -> Exited:
    return Exited(1, 0, 4711, returncode, 100.0, stopping=stopping)


def test_a_worker_that_is_stopped_while_it_ends_because_of_an_exception_has_failed() -> None:
    note = Note(99.8, 1, ("ValueError: bad batch",))
    end = reported(exited(-signal.SIGTERM, stopping=True), Remains(7, note), 99.9, "Epoch 1\n")
    assert (end.report.returncode, end.report.state, end.report.step) == (1, WorkerState.FAILED, 7)
    assert end.failure is not None
    assert end.failure.message == "ValueError: bad batch"
    assert end.report.failed_s == pytest.approx((end.report.ended_s or 0.0) - 0.2, abs=0.01)


def test_a_worker_whose_script_ends_because_of_the_stop_was_stopped() -> None:
    end = reported(exited(-signal.SIGTERM, stopping=True), Remains(0, Note(99.95, 1, ("KeyError: 1",))), 99.9)
    assert end.report.state is WorkerState.STOPPED


@pytest.mark.parametrize(("stopped_s", "stopping"), [(99.9, True), (100.1, False)])
def test_a_worker_that_had_died_before_the_stop_was_killed_by_something_else(
    stopped_s: float, stopping: bool
) -> None:
    end = reported(exited(-signal.SIGKILL, stopping=True), Remains(), stopped_s)
    assert (end.report.state is WorkerState.STOPPED, end.failure is None) == (stopping, stopping)


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
    end = reported(exited(-signal.SIGKILL, stopping=True), Remains(0, note), 99.9)
    assert has_not_saved(end, signal.SIGTERM) is is_named


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
    (line,) = [one for one in done.stderr.splitlines() if "root cause" in one]
    assert what in line
