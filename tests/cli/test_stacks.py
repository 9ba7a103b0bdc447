"""``elastic-agent stacks`` on a machine where other processes claim to be workers."""

from __future__ import annotations

import os
import secrets
import signal
import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.cli.support import elastic_agent

OTHER_USER = 61_002
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
    run_id = f"claimed-{secrets.token_hex(4)}"
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
    told = elastic_agent("stacks", claims)
    assert told.returncode == 2
    assert f"no running worker of run {claims} of user" in told.stderr
    told = elastic_agent("stacks", claims, "--user", str(OTHER_USER))
    assert told.returncode == 0
    assert "\x1b" not in told.stdout
    assert "n1/\\x1b[2J0" in told.stdout


@pytest.mark.parametrize("claims", [(os.geteuid(), 0), (os.geteuid(), 99)], indirect=True)
def test_a_process_with_an_invalid_stacks_signal_is_not_a_worker(claims: str) -> None:
    told = elastic_agent("stacks", claims)
    assert (told.returncode, told.stderr.count("\n")) == (2, 1)
    assert f"no running worker of run {claims}" in told.stderr
