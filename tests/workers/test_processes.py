"""Processes as /proc shows them, also when the kernel cut their name in the middle of a character."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator

import pytest

from elastic_agent import linux
from elastic_agent.testing.processes import freeze
from tests.names import unique
from tests.processes import CUT_NAME, TAKE_A_CUT_NAME, process_with_a_cut_name

MARKS = {
    "ELASTIC_AGENT_RUN_ID": unique("cut"),
    "ELASTIC_AGENT_WORKER_ID": "n1/0",
    "ELASTIC_AGENT_STACKS_SIGNAL": str(int(signal.SIGUSR1)),
}
HANDLE_USR1 = "import faulthandler; faulthandler.register(10, file=1)"


@pytest.fixture
def pid() -> Iterator[int]:
    with process_with_a_cut_name(MARKS, HANDLE_USR1) as pid:
        yield pid


def test_a_processs_name_state_and_parent_are_known(pid: int) -> None:
    process = linux.read_process(pid)
    assert process is not None
    assert (process.parent, process.dead, process.frozen) == (os.getpid(), False, False)
    assert process.key == (pid, linux.start_ticks(pid))
    assert linux.process_name(pid) == CUT_NAME
    assert pid in {process.pid for process in linux.all_processes()}
    freeze(pid)
    assert linux.is_frozen(pid)


def test_the_signal_handlers_of_a_process_are_known(pid: int) -> None:
    assert linux.catches(pid, signal.SIGUSR1)
    assert not linux.catches(pid, signal.SIGUSR2)


def test_exited_processes_are_not_listed() -> None:
    zombie = subprocess.Popen([sys.executable, "-S", "-c", TAKE_A_CUT_NAME])
    os.waitid(os.P_PID, zombie.pid, os.WEXITED | os.WNOWAIT)
    assert linux.start_ticks(zombie.pid) is None
    zombie.wait()
    assert linux.read_process(zombie.pid) is None
    assert linux.process_name(zombie.pid) == ""
    assert not linux.is_frozen(zombie.pid)
    assert not linux.catches(zombie.pid, signal.SIGUSR1)
    with pytest.raises(OSError, match="No such"):
        linux.environment(zombie.pid)


def test_the_threads_of_this_process_are_listed() -> None:
    names: list[str] = []

    def note() -> None:
        exec(TAKE_A_CUT_NAME)
        names.extend(linux.thread_names())

    thread = threading.Thread(target=note)
    thread.start()
    thread.join()
    assert names[0] == linux.process_name(os.getpid())
    assert CUT_NAME in names
