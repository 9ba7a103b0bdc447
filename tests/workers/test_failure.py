"""The description of a failed worker."""

from __future__ import annotations

import json
import os
import signal
import unicodedata

import pytest
from hypothesis import given
from hypothesis import strategies as st

from elastic_agent.workers.failure import describe

TRACEBACK = """\
step 1
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    main()
RuntimeError: boom
"""

ABORTED = "terminate called without an active exception\n"
OF_A_THREAD = """\
Exception in thread Thread-1 (watch):
Traceback (most recent call last):
  File "threading.py", line 1038, in run
    watch()
KeyError: 'thread'
"""


any_text = st.text(st.characters(codec=None), max_size=100)
"""Lone surrogates included, as in file names that are no UTF-8."""


def recorded(message: str, stack: str = "") -> str:
    """Return the content of the file that torch's `@record` writes."""
    return json.dumps(
        {"message": {"message": message, "extraInfo": {"py_callstack": stack, "timestamp": "1"}}}
    )


@pytest.mark.parametrize(
    ("returncode", "stderr", "summary"),
    [
        (1, TRACEBACK, "exited with code 1: RuntimeError: boom"),
        (
            1,
            TRACEBACK + "[W1120] destroy_process_group() was not called\n",
            "exited with code 1: RuntimeError: boom",
        ),
        (1, TRACEBACK.replace("\n", "\n[rank0]: "), "exited with code 1: RuntimeError: boom"),
        (
            1,
            TRACEBACK + "\nDuring handling of the above …\n\n" + TRACEBACK.replace("boom", "later"),
            "exited with code 1: RuntimeError: later",
        ),
        (
            1,
            TRACEBACK.replace("RuntimeError: boom", "torch.cuda.OutOfMemoryError"),
            "exited with code 1: torch.cuda.OutOfMemoryError",
        ),
        (
            1,
            "  File \"train.py\", line 1\n    x = (\n        ^\nSyntaxError: '(' was never closed\n",
            "exited with code 1: SyntaxError: '(' was never closed",
        ),
        (
            2,
            TRACEBACK + "train.py: error: unrecognized arguments: --x\n",
            "exited with code 2: train.py: error: unrecognized arguments: --x",
        ),
        (3, "", "exited with code 3"),
        (3, " \n--\n", "exited with code 3"),
        (1, "\x1b[31mred\x1b[0m error\x07\n", "exited with code 1; its last line: red error"),
        (
            1,
            "no data\n/lib/a b/reading.py:7: UserWarning: 3 files are empty\n  warnings.warn(\n",
            "exited with code 1; its last line: /lib/a b/reading.py:7: UserWarning: 3 files are empty",
        ),
        (
            1,
            "reading.py:7: UserWarning: 3 files are empty\n  warnings.warn(\nno data\n",
            "exited with code 1; its last line: no data",
        ),
        (1, "50 %\r100 %\rfatal: no data", "exited with code 1; its last line: fatal: no data"),
        (-9, "", "was killed by SIGKILL"),
        (-9, TRACEBACK, "was killed by SIGKILL"),
        (-11, "", "was killed by SIGSEGV (crash in native code)"),
        (
            -11,
            "Fatal Python error: Segmentation fault\n\nCurrent thread 0x0 (most recent call first):\n",
            "was killed by SIGSEGV (crash in native code)",
        ),
        (
            -6,
            "terminate called after throwing a 'c10::Error'\n  what():  CUDA error: device-side assert\n",
            "was killed by SIGABRT: CUDA error: device-side assert",
        ),
        # A thread of gloo may abort the process while Python exits because of the exception.
        (-6, TRACEBACK + ABORTED, "was killed by SIGABRT at train.py:3: RuntimeError: boom"),
        (-6, ABORTED, "was killed by SIGABRT (aborted by native code)"),
        (-15, "", "was terminated by SIGTERM"),
        (-15, TRACEBACK, "was terminated by SIGTERM at train.py:3: RuntimeError: boom"),
        (-15, TRACEBACK + "step 2\nstep 3\n", "was terminated by SIGTERM"),
        (-2, "", "was killed by SIGINT"),
        (-2, TRACEBACK, "was killed by SIGINT"),
        (
            -2,
            TRACEBACK.replace("RuntimeError: boom", "KeyboardInterrupt").replace("\n", "\n[rank0]: "),
            "was killed by SIGINT at train.py:3: KeyboardInterrupt (the worker was told to stop)",
        ),
        (1, OF_A_THREAD, "exited with code 1: KeyError: 'thread'"),
        (-12, "", "was killed by SIGUSR2"),
        (-33, "", "was killed by signal 33"),
    ],
)
def test_the_summary_from_stderr(returncode: int, stderr: str, summary: str) -> None:
    assert describe(0, returncode, "", stderr).summary("n2") == f"worker n2/0 {summary}"


def test_a_syntax_error_is_placed_although_it_has_no_traceback() -> None:
    stderr = "  File \"/mnt/syn.py\", line 4\n    def f()\n           ^\nSyntaxError: expected ':'\n"
    assert describe(0, 1, "", stderr).line == "syn.py:4"
    assert describe(0, 1, "", stderr.replace("SyntaxError: ", "")).line == "", "a line of source is no error"


def test_the_error_file_takes_precedence_over_stderr() -> None:
    failure = describe(11, 1, recorded("ValueError: bad\nshape", "Traceback …\nValueError: bad"), "noise")
    assert failure.summary("rack7/a") == "worker rack7/a/11 exited with code 1: ValueError: bad shape"
    assert failure.tail == "Traceback …\nValueError: bad"
    without_traceback = describe(0, 1, json.dumps({"message": "out of data"}), TRACEBACK)
    assert (without_traceback.message, without_traceback.tail) == ("out of data", TRACEBACK.strip())


@pytest.mark.parametrize(
    "content",
    [
        "",
        "{",
        "null",
        "7",
        "[]",
        "{}",
        '{"message": null}',
        '{"message": {"message": 3}}',
        "[" * 100_000,
        '{"message": {"message": "x", "extraInfo": 3}}',
    ],
)
def test_any_other_error_file_is_ignored(content: str) -> None:
    assert describe(0, 1, content, TRACEBACK).message in ("RuntimeError: boom", "x")


@pytest.mark.parametrize(
    ("returncode", "error", "summary"),
    [
        (1, "", "exited with code 1 (no space for its output: DISK FULL)"),
        (1, "boom", "exited with code 1 (no space for its output: DISK FULL): boom"),
        (-7, "", "was killed by SIGBUS (no space for its output: DISK FULL)"),
    ],
)
def test_a_full_disk_is_reported_before_the_error(returncode: int, error: str, summary: str) -> None:
    failure = describe(0, returncode, recorded(error), "", "DISK FULL")
    assert failure.summary("n2") == f"worker n2/0 {summary}"


AT_EXIT = """\
Error in atexit._run_exitfuncs:
Traceback (most recent call last):
  File "logger.py", line 9, in close
    file.flush()
ValueError: I/O operation on closed file.
"""
IN_A_DESTRUCTOR = """\
Exception ignored in: <function Pool.__del__ at 0x7f>
Traceback (most recent call last):
  File "pool.py", line 268, in __del__
    self._change_notifier.put(None)
AttributeError: 'NoneType' object has no attribute 'put'
"""
CHAINED = """\
Traceback (most recent call last):
  File "train.py", line 3, in <module>
    int("x")
ValueError: invalid literal

The above exception was the direct cause of the following exception:

Traceback (most recent call last):
  File "train.py", line 5, in <module>
    raise RuntimeError("boom") from error
RuntimeError: boom
"""


@pytest.mark.parametrize(
    ("stderr", "tail"),
    [
        (OF_A_THREAD + TRACEBACK, TRACEBACK),
        (TRACEBACK + OF_A_THREAD, TRACEBACK),
        (TRACEBACK + "\n" + AT_EXIT, TRACEBACK),
        (IN_A_DESTRUCTOR + "\n" + TRACEBACK + "\n" + IN_A_DESTRUCTOR, TRACEBACK),
        ("step 1\n" + CHAINED + "\n" + AT_EXIT, CHAINED),
        (TRACEBACK + ABORTED, TRACEBACK),
    ],
)
def test_of_several_tracebacks_the_one_that_ended_the_script_is_shown(stderr: str, tail: str) -> None:
    failure = describe(0, -signal.SIGABRT if ABORTED in stderr else 1, "", stderr)
    assert failure.message == "RuntimeError: boom"
    assert failure.tail == tail.removeprefix("step 1\n").strip()


SEMAPHORE = """\
Traceback (most recent call last):
  File "train.py", line 7, in <module>
    lock = multiprocessing.Lock()
  File "/usr/lib/python3.11/multiprocessing/synchronize.py", line 57, in __init__
    sl = self._semlock = _multiprocessing.SemLock(
                         ^^^^^^^^^^^^^^^^^^^^^^^^^
{error}
"""


@pytest.mark.parametrize(
    ("error", "known"),
    [
        ("OSError: [Errno 30] Read-only file system", "shm-unusable"),
        ("FileNotFoundError: [Errno 2] No such file or directory", "shm-unusable"),
        ("PermissionError: [Errno 13] Permission denied", "shm-unusable"),
        ("OSError: [Errno 28] No space left on device", "shm-full"),
    ],
)
def test_the_error_of_a_semaphore_is_attributed_to_the_folder_of_semaphores(error: str, known: str) -> None:
    failure = describe(0, 1, "", SEMAPHORE.format(error=error))
    assert failure.message == error
    assert failure.recognised is not None
    assert failure.recognised.name == known
    assert "/dev/shm" in failure.recognised.meaning
    other = describe(0, 1, "", SEMAPHORE.format(error=error).replace("_multiprocessing.SemLock(", "open("))
    assert other.recognised is None or other.recognised.name != known


def test_what_libraries_write_after_the_traceback_does_not_displace_it() -> None:
    leaks = "nanobind: leaked 4 instances!\n" + " - leaked instance of type attribute\n" * 200
    failure = describe(0, 1, "", TRACEBACK + leaks)
    assert failure.message == "RuntimeError: boom"
    assert failure.tail.startswith('Traceback (most recent call last):\n  File "train.py", line 3')


def test_a_long_traceback_keeps_the_frames_of_the_script() -> None:
    installed = (
        '  File "/venv/lib/python3.11/site-packages/torch/nn/module.py", line 1, in call\n    return x\n'
    )
    inner = '  File "/home/me/model.py", line 77, in forward\n    return self.layer(x)\n'
    outer = '  File "/home/me/train.py", line 8, in <module>\n    main()\n'
    text = f"Traceback (most recent call last):\n{outer}{installed * 30}{inner}{installed * 30}RuntimeError: boom\n"
    elided = "  [frames in installed packages]\n"
    expected = f"Traceback (most recent call last):\n{outer}{elided}{inner}{elided}RuntimeError: boom"
    assert describe(0, 1, "", text).tail == expected
    assert describe(0, 1, recorded("RuntimeError: boom", text), "").tail == expected


def test_sizes_are_bounded() -> None:
    lines = "".join(f"line {number} ü\n" for number in range(10_000))
    failure = describe(0, 1, recorded("E" * 10_000), lines)
    assert len(failure.message) == 500
    assert failure.message.endswith("E…")
    assert len(failure.tail.encode()) <= 2048
    assert failure.tail.startswith("line ")
    assert failure.tail.endswith("line 9999 ü")


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x9b31mred\x9b0m", "red"),
        ("\x9d0;title\x9cred", "red"),
        ("\x1b]0;title\x1b\\red", "red"),
        ("r\u202ee\u202cd", "red"),
        ("\u2066\u200ered\u200f\u2069\u061c", "red"),
        ("\x85red\u2028", "red"),
        (os.fsdecode(b"caf\xe9.jpg"), r"caf\udce9.jpg"),
    ],
)
def test_unprintable_characters_in_errors_are_removed_or_escaped(text: str, shown: str) -> None:
    for failure in (describe(0, 1, recorded(text, text), ""), describe(0, 1, "", text)):
        assert failure.message + failure.last_line == shown
        assert failure.tail == shown


@given(
    returncode=st.integers(-64, 255).filter(bool),
    error_file=st.text() | any_text.map(recorded),
    stderr=st.text(max_size=5000) | any_text.map(lambda text: TRACEBACK + text),
)
def test_the_summary_is_one_printable_line_for_any_output(
    returncode: int, error_file: str, stderr: str
) -> None:
    failure = describe(0, returncode, error_file, stderr)
    summary = failure.summary("n2")
    assert len(summary.splitlines()) == 1
    assert len(failure.message) <= 500
    assert len(failure.tail.encode()) <= 2048
    assert not any(unicodedata.category(character) in ("Cc", "Cs") for character in summary)
    assert not any(ord(character) < 32 and character not in "\n\t" for character in failure.tail)


def test_the_summary_names_what_was_observed_and_leaves_the_remedy_to_the_root_cause() -> None:
    stderr = TRACEBACK.replace("RuntimeError: boom", "OSError: [Errno 24] Too many open files: 'x'")
    summary = describe(0, 1, "", stderr, facts={"open_files": "limit 1024"}).summary("n2")
    assert summary == (
        "worker n2/0 exited with code 1: OSError: [Errno 24] Too many open files: 'x' (limit 1024)"
    )


def test_the_summary_says_that_an_error_is_a_consequence() -> None:
    stderr = TRACEBACK.replace(
        "boom",
        "[/pytorch/gloo/transport/tcp/pair.cc:5] Connection closed by peer [10.0.0.2]:4711. This is typically caused "
        "by a remote worker crashing. Check the logs of the remote worker before reporting an error. GLHF! 🏖️",
    )
    summary = describe(0, 1, "", stderr).summary("n2")
    assert summary == (
        "worker n2/0 exited with code 1: RuntimeError: Connection closed by peer [10.0.0.2]:4711 (another worker "
        "closed its connection: it ended before)"
    )


def test_a_long_error_is_shortened_so_that_what_was_observed_fits() -> None:
    stderr = TRACEBACK.replace("boom", "Too many open files " + 600 * "x")
    summary = describe(0, 1, "", stderr, facts={"open_files": "limit 1024"}).summary("n2")
    assert len(summary) <= 512
    assert summary.endswith("… (limit 1024)")


@pytest.mark.parametrize(
    ("facts", "hint"),
    [
        ({"oom_kills": "1", "memory_limit": "2.0 GB"}, " (out of memory: the limit is 2.0 GB)"),
        ({"oom_kills": "1"}, " (out of memory)"),
        ({"oom_kills": "0"}, ""),
        ({}, ""),
    ],
)
def test_a_kill_is_attributed_to_a_lack_of_memory_only_if_the_kernel_counted_one(
    facts: dict[str, str], hint: str
) -> None:
    assert describe(0, -9, "", "", facts=facts).summary("n2") == f"worker n2/0 was killed by SIGKILL{hint}"
