"""A crash in native code is attributed to a line of the script, by the stacks that faulthandler writes."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.workers.failure import describe
from elastic_agent.workers.tracebacks import script_line
from tests.cli.support import LONG_LEASE, elastic_agent

GLOO = """step 3
terminate called after throwing an instance of 'gloo::EnforceNotMet'
  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 668 vs 336. Received data size
Fatal Python error: Aborted

Thread 0x00007fa00d7fa6c0 [answers] (most recent call first):
  File "/env/site-packages/elastic_agent/integrations/collectives/answers.py", line 92 in _answer

Thread 0x00007fa01f441b80 (most recent call first):
  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252 in all_reduce
  File "/home/me/train.py", line 6 in reduce
  File "/home/me/train.py", line 14 in <module>
  File "/env/site-packages/elastic_agent/__main__.py", line 24 in begin
  File "/env/bin/elastic-agent", line 8 in <module>

Extension modules: numpy._core._multiarray_umath, torch._C (total: 2)
"""


def test_an_abort_in_a_thread_of_gloo_is_attributed_to_the_line_where_the_main_thread_is() -> None:
    failure = describe(0, -6, "", GLOO)
    assert failure.line == "train.py:6"
    assert failure.summary("n1").startswith(
        "worker n1/0 was killed by SIGABRT at train.py:6: op.preamble.length <= op.nbytes. 668 vs 336."
    )
    assert failure.tail.splitlines() == [
        "Fatal Python error (most recent call last):",
        '  File "/home/me/train.py", line 14, in <module>',
        '  File "/home/me/train.py", line 6, in reduce',
        '  File "/env/lib/python3.11/site-packages/torch/distributed/distributed_c10d.py", line 3252, in all_reduce',
        "step 3",
        "terminate called after throwing an instance of 'gloo::EnforceNotMet'",
        "  what():  [enforce fail at pair.cc:456] op.preamble.length <= op.nbytes. 668 vs 336. Received data size",
    ]


ASKED = """
import faulthandler, os, signal, sys, threading
faulthandler.enable()
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
threading.Thread(target=threading.Event().wait, daemon=True).start()

def step():
    print("loss 0.5", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGUSR1)
    print("loss 0.4", file=sys.stderr)
    os.kill(os.getpid(), signal.SIGUSR1)
    END

step()
"""


@pytest.mark.parametrize(
    ("end", "tail", "last_line"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", ["loss 0.5", "loss 0.4"], ""),
        ("os._exit(3)", ["loss 0.5", "loss 0.4"], "loss 0.4"),
        (
            "raise ValueError('bad')",
            [
                "Traceback (most recent call last):",
                '  File "train.py", line 14, in <module>',
                "    step()",
                '  File "train.py", line 12, in step',
                "    raise ValueError('bad')",
                "ValueError: bad",
            ],
            "",
        ),
        (
            "os.abort()",
            [
                "Fatal Python error (most recent call last):",
                '  File "train.py", line 14, in <module>',
                '  File "train.py", line 12, in step',
                "loss 0.5",
                "loss 0.4",
            ],
            "",
        ),
    ],
    ids=["killed", "exited", "raised", "aborted"],
)
def test_stacks_that_were_requested_are_not_the_output_of_the_script(
    tmp_path: Path, end: str, tail: list[str], last_line: str
) -> None:
    (tmp_path / "train.py").write_text(ASKED.replace("END", end))
    done = subprocess.run([sys.executable, "train.py"], capture_output=True, text=True, cwd=tmp_path)
    assert done.stderr.count("Current thread 0x") >= 2
    named = done.stderr.replace("Thread 0x", "stacks of worker n1/0 (pid 123):\nThread 0x", 1)
    for stderr in (done.stderr, named):
        failure = describe(0, done.returncode, "", stderr)
        assert failure.tail.replace(f"{tmp_path}/", "").splitlines() == tail
        assert failure.last_line == last_line


def test_stacks_that_the_script_itself_writes_after_a_time_limit_are_its_output(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text(
        "import faulthandler, threading\nfaulthandler.dump_traceback_later(0.01, exit=True)\n"
        "threading.Event().wait()\n"
    )
    done = subprocess.run([sys.executable, str(script)], capture_output=True, text=True)
    assert f'File "{script}", line 3 in <module>' in describe(0, done.returncode, "", done.stderr).tail


def test_the_crash_of_a_process_that_the_worker_forked_is_not_the_workers() -> None:
    assert describe(0, 1, "", GLOO + "Traceback (most recent call last):\nRuntimeError: boom").message == (
        "RuntimeError: boom"
    )


def test_the_line_of_a_traceback_is_the_scripts_and_not_that_of_a_package() -> None:
    text = (
        'Traceback (most recent call last):\n  File "/home/me/train.py", line 3, in <module>\n    fit()\n'
        '  File "/env/lib/python3.11/site-packages/torch/x.py", line 9, in fit\n    raise ValueError\nValueError'
    )
    assert script_line(text) == "train.py:3"
    assert script_line("no traceback") == script_line('  File "<string>", line 1, in <module>') == ""


@pytest.mark.parametrize("start", ["warm", pytest.param("cold", marks=pytest.mark.prove)])
def test_the_log_names_the_line_in_which_a_worker_crashed(tmp_path: Path, start: str) -> None:
    script = tmp_path / "train.py"
    script.write_text("import ctypes\n\n\ndef step():\n    ctypes.string_at(0)\n\n\nstep()\n")
    options = ["--state-dir", str(tmp_path / "state"), "--max-restarts", "0", "--worker-start", start]
    done = elastic_agent(
        "--standalone", "--log-format", "console", *options, str(script), variables=LONG_LEASE
    )
    assert "was killed by SIGSEGV at train.py:5 (crash in native code)" in done.stderr
    assert "was killed by SIGSEGV (at train.py:5)" in done.stderr, "the root cause"
