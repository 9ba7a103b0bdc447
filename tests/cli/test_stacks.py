"""``elastic-agent stacks`` on a machine where other processes claim to be workers."""

from __future__ import annotations

import os
import pty
import re
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.testing.node import freeze
from tests.cli.support import elastic_agent, refusal
from tests.names import unique

OTHER_USER = 61_002
WORKER = """
import faulthandler, signal
faulthandler.register(signal.SIGUSR1, file=2, all_threads=True, chain=False)
signal.alarm(600)
print('ready', flush=True)
while True:
    signal.pause()
"""
CLAIMANT = """
import os, signal, sys
signal.alarm(600)
os.setuid(int(sys.argv[1]))
print('ready', flush=True)
signal.pause()
"""


@pytest.fixture
def claims(request: pytest.FixtureRequest) -> Iterator[str]:
    """Starts a process that claims to be a worker (user and signal are parameters); the name of its run."""
    uid, number = request.param
    if uid != os.geteuid() and os.geteuid() != 0:
        pytest.skip("only root can start another user's process")
    run_id = unique("claimed")
    env = {
        "ELASTIC_AGENT_RUN_ID": run_id,
        "ELASTIC_AGENT_WORKER_ID": "n1/\x1b[2J0",
        "ELASTIC_AGENT_STACKS_SIGNAL": str(number),
    }
    command = [sys.executable, "-S", "-c", CLAIMANT, str(uid)]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, cwd="/") as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        yield run_id
        assert process.poll() is None, "it was disturbed"
        process.kill()


@pytest.mark.parametrize("claims", [(OTHER_USER, signal.SIGUSR1)], indirect=True)
def test_root_signals_other_users_workers_only_with_user(claims: str) -> None:
    assert f"no running worker of run {claims} of user" in refusal("stacks", claims)
    told = elastic_agent("stacks", claims, "--user", str(OTHER_USER))
    assert told.returncode == 0
    assert "\x1b" not in told.stdout
    assert "n1/\\x1b[2J0" in told.stdout


@pytest.mark.parametrize("claims", [(os.geteuid(), 0), (os.geteuid(), 99)], indirect=True)
def test_a_process_with_an_invalid_stacks_signal_is_not_a_worker(claims: str) -> None:
    assert f"no running worker of run {claims}" in refusal("stacks", claims)


@pytest.mark.parametrize("claims", [(os.geteuid(), signal.SIGUSR1)], indirect=True)
def test_a_worker_that_would_die_of_the_signal_is_listed_and_left_alone(claims: str) -> None:
    told = elastic_agent("stacks", claims)
    assert (told.returncode, told.stdout.count("\n")) == (0, 1)
    assert "not possible: started cold, or executed itself again (exec)" in told.stdout


@contextmanager
def worker(run_id: str, worker_id: str, stderr: int) -> Iterator[subprocess.Popen[bytes]]:
    """A process that is a worker as far as ``stacks`` can tell."""
    env = {
        "ELASTIC_AGENT_RUN_ID": run_id,
        "ELASTIC_AGENT_WORKER_ID": worker_id,
        "ELASTIC_AGENT_STACKS_SIGNAL": str(int(signal.SIGUSR1)),
    }
    command = [sys.executable, "-S", "-c", WORKER]
    with subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=stderr, cwd="/") as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == b"ready\n"
            yield process
        finally:
            process.kill()


def test_stacks_in_a_shared_output_name_their_workers() -> None:
    run_id = unique("shared")
    master, slave = pty.openpty()  # as the agent makes one for the worker
    try:
        with worker(run_id, "n1/0", slave) as first, worker(run_id, "n1/1", slave) as second:
            told = elastic_agent("stacks", run_id).stdout
            written = ""
            while written.count("stacks of worker") < 2 or written.count("Current thread") < 2:
                written += os.read(master, 65536).decode()
    finally:
        os.close(master)
        os.close(slave)
    assert "/dev/pts" not in told
    assert told.count("requested, see the output of its agent") == 2
    names = [f"stacks of worker n1/{slot} (pid {one.pid}):" for slot, one in enumerate((first, second))]
    assert written.startswith(names[0])
    assert names[1] in written
    assert written.rindex("Current thread") > written.index(names[1]), "a name comes before the stacks"


def test_a_stopped_worker_is_named_with_what_continues_it_and_is_not_asked() -> None:
    run_id = unique("stopped")
    with worker(run_id, "n1/0", subprocess.PIPE) as process:
        freeze(process.pid)
        told = elastic_agent("stacks", run_id)
        pending = int(
            re.findall(r"(?m)^ShdPnd:\s(\w+)", Path(f"/proc/{process.pid}/status").read_text())[0], 16
        )
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout == (
        f"{run_id}  n1/0  pid {process.pid}  not possible: stopped by a signal or a debugger (state T); "
        f"kill -CONT {process.pid} continues it\n"
    )
    assert not pending & 1 << signal.SIGUSR1 - 1, "it would write its stacks long after it was asked"


def test_of_several_runs_one_has_to_be_named() -> None:
    runs = sorted(unique("several") for _ in range(2))
    with worker(runs[0], "n1/0", subprocess.PIPE), worker(runs[1], "n1/0", subprocess.PIPE):
        refused = refusal("stacks")
        assert elastic_agent("stacks", runs[0]).returncode == 0
    assert "this machine has workers of several runs (" in refused
    assert all(run in refused for run in runs)  # and others that run on this machine
    assert "select one with elastic-agent stacks RUN" in refused
