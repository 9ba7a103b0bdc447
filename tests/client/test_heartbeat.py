"""client.heartbeat(): an agent in another process sees it, and only the worker itself is heard."""

from __future__ import annotations

import errno
import signal

import pytest

from elastic_agent.client._cells import HeartbeatFile
from tests.client.support import AGENT_ENVIRONMENT, SLOT, run_script, running, under_agent

# Beats with whatever step it is told, and says so; an empty line is a beat without a step.
BEAT_ON_REQUEST = """
import sys
from elastic_agent import client

for line in sys.stdin:
    client.heartbeat(*map(int, line.split()))
    print("done")
"""


def test_agent_sees_each_beat_and_its_step_at_once(cells: HeartbeatFile) -> None:
    """A beat without a step keeps the last one; steps may be negative or large."""
    lines = {"41": 41, "42": 42, "": 42, "-1": -1, str(-(2**63)): -(2**63), str(2**63 - 1): 2**63 - 1}
    with running(BEAT_ON_REQUEST, under_agent(cells)) as worker:
        for beats, (line, step) in enumerate(lines.items(), 1):
            assert cells.read(SLOT)[0] == beats - 1
            assert worker.ask(line) == "done"
            assert cells.read(SLOT) == (beats, step)


FORKED = """
child = os.fork()
if child == 0:
    for step in range(1000, 2000):
        client.heartbeat(step)
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
EXECUTED = """
beat = "from elastic_agent import client; client.heartbeat(1000)"
subprocess.run([sys.executable, "-c", beat], check=True)
"""
"""A DataLoader with the start method "spawn" or "forkserver", or any Python helper."""


@pytest.mark.parametrize("child", [FORKED, EXECUTED], ids=["forked", "executed"])
@pytest.mark.parametrize("beats_before", [0, 3])
def test_heartbeats_of_a_child_of_the_worker_do_not_count(
    cells: HeartbeatFile, beats_before: int, child: str
) -> None:
    script = f"""
import os, subprocess, sys
from elastic_agent import client
for step in range({beats_before}):
    client.heartbeat(step)
{child}
print("child done")
input()
client.heartbeat(7)
print("beaten")
input()
"""
    with running(script, under_agent(cells)) as worker:
        assert worker.hear() == "child done"
        assert cells.read(SLOT)[0] == beats_before
        assert cells.read(SLOT)[1] < 1000
        assert worker.ask() == "beaten"
        assert cells.read(SLOT) == (beats_before + 1, 7)


def test_heartbeats_count_after_a_worker_executes_another_program(cells: HeartbeatFile) -> None:
    script = """
        import os, sys
        from elastic_agent import client

        client.heartbeat(1)
        beat = "from elastic_agent import client; client.heartbeat(2)"
        os.execv(sys.executable, [sys.executable, "-c", beat])
    """
    run_script(script, under_agent(cells))
    assert cells.read(SLOT) == (2, 2)


def test_worker_without_the_client_may_start_one_with_it(cells: HeartbeatFile) -> None:
    """A wrapper, in whatever language, around the training script."""
    script = """
        import subprocess, sys

        beat = "from elastic_agent import client; client.heartbeat(5)"
        subprocess.run([sys.executable, "-c", beat], check=True)
    """
    run_script(script, under_agent(cells))
    assert cells.read(SLOT) == (1, 5)


def test_without_an_agent_a_beat_does_nothing() -> None:
    done = run_script("from elastic_agent import client; client.heartbeat(); client.heartbeat(3)", {})
    assert done.stdout == done.stderr == ""


@pytest.mark.parametrize("with_agent", [True, False])
@pytest.mark.parametrize(
    ("step", "error"), [("'3'", "TypeError"), ("0.5", "TypeError"), ("2**63", "ValueError")]
)
def test_an_invalid_step_is_refused_with_or_without_an_agent(
    cells: HeartbeatFile, with_agent: bool, step: str, error: str
) -> None:
    script = f"from elastic_agent import client; client.heartbeat({step})"
    done = run_script(script, under_agent(cells) if with_agent else {}, returncode=1)
    last = done.stderr.splitlines()[-1]
    assert last == f"{error}: heartbeat: step={eval(step)!r}; expected a 64-bit integer"
    assert cells.read(SLOT) == (0, 0)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"ELASTIC_AGENT_HEARTBEAT": "/nonexistent/heartbeats"}, "No such file or directory"),
        ({"ELASTIC_AGENT_SLOT": "3"}, "3456 bytes long, too short for slot 3"),
        ({"ELASTIC_AGENT_SLOT": "x"}, "ELASTIC_AGENT_SLOT='x' in the environment; expected a whole number"),
    ],
)
def test_an_unusable_heartbeat_file_does_not_stop_training(
    cells: HeartbeatFile, changes: dict[str, str], told: str
) -> None:
    script = "from elastic_agent import client; [client.heartbeat(s) for s in range(3)]; print('trained')"
    done = run_script(script, {**under_agent(cells), **changes})
    assert done.stdout == "trained\n"
    [line] = done.stderr.splitlines()
    assert line.startswith(
        "elastic_agent.client: heartbeats and notices are disabled (ELASTIC_AGENT_HEARTBEAT="
    )
    assert told in line


def test_an_unusable_heartbeat_file_is_not_reported_to_scripts_that_never_beat() -> None:
    done = run_script(
        "from elastic_agent import client", {**AGENT_ENVIRONMENT, "ELASTIC_AGENT_HEARTBEAT": "/no"}
    )
    assert done.stderr == ""


# In the kernel's strict mode any system call but read, write and exit kills the process.
NO_SYSTEM_CALLS = """
import ctypes, os, sys
from elastic_agent import client

client.heartbeat(0)
libc = ctypes.CDLL(None, use_errno=True)
PR_SET_SECCOMP, SECCOMP_MODE_STRICT = 22, 1
if libc.prctl(PR_SET_SECCOMP, SECCOMP_MODE_STRICT) != 0:
    os._exit(ctypes.get_errno())
for step in range(1, 1001):
    BODY
os.write(1, b"survived")
os._exit(0)
"""


def in_strict_mode(body: str, variables: dict[str, str]) -> str:
    done = run_script(NO_SYSTEM_CALLS.replace("BODY", body), variables, returncode=None)
    if done.returncode in (errno.EINVAL, errno.ENOSYS, errno.EPERM, errno.EACCES):
        pytest.skip(f"this kernel has no strict seccomp mode (errno {done.returncode})")
    # Even os._exit makes a system call (exit_group) that is not allowed.
    assert done.returncode == -signal.SIGKILL, done.stderr
    return done.stdout


def test_beating_makes_no_system_call(cells: HeartbeatFile) -> None:
    assert in_strict_mode("client.heartbeat(step)", under_agent(cells)) == "survived"
    assert cells.read(SLOT) == (1001, 1000)


def test_the_check_for_system_calls_detects_one(cells: HeartbeatFile) -> None:
    assert in_strict_mode("client.heartbeat(step); os.getppid()", under_agent(cells)) == ""
    assert cells.read(SLOT) == (2, 1)
