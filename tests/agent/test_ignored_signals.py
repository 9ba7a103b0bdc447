"""Signals that were ignored when the agent was started: by ``nohup``, or by a script that runs it with ``&``."""

from __future__ import annotations

import os
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from elastic_agent.exit_codes import ExitCode
from tests.agent.support import COMMAND, clean_environment, elastic_agent
from tests.ports import free_port

IGNORING = ["sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh"]
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
PATIENCE_S = 300.0


@contextmanager
def started(*argv: str) -> Iterator[subprocess.Popen[str]]:
    """A command that ignores signals from its start; killed in the end if it still runs."""
    process = subprocess.Popen(
        [*IGNORING, *COMMAND, *argv],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            process.kill()


@contextmanager
def training(folder: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """An agent whose worker runs until it reads a line."""
    script = folder / "train.py"
    script.write_text("print('up', flush=True); input()\n")
    with started(
        "--worker-start", "cold", "--state-dir", str(folder / "state"), *options, str(script)
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "up\n"
        yield process


def test_ignored_signals_stay_ignored_and_are_logged_once(tmp_path: Path) -> None:
    with training(tmp_path) as agent:
        for signum in IGNORED:
            os.kill(agent.pid, signum)
        _, log = agent.communicate("\n", PATIENCE_S)
    assert agent.returncode == 0, log
    assert log.count("ignoring SIGINT, SIGHUP, SIGQUIT, which were ignored when this agent was started") == 1
    assert "the run finished" in log


def test_an_ignored_signal_that_is_configured_is_handled(tmp_path: Path) -> None:
    with training(tmp_path, "--signals-to-handle", "SIGHUP") as agent:
        os.kill(agent.pid, signal.SIGHUP)
        assert agent.wait(PATIENCE_S) == ExitCode.STOPPED
        assert agent.stderr is not None
        log = agent.stderr.read()
    assert "SIGHUP received" in log
    assert "ignoring" not in log


def test_the_settings_list_the_remaining_signals() -> None:
    done = elastic_agent("settings", under=IGNORING)
    assert 'signals_to_handle = "SIGTERM"  ' in done.stdout
    assert "# default, without SIGINT, SIGHUP, SIGQUIT: ignored when the agent was started" in done.stdout


def test_a_background_server_of_a_script_survives_ctrl_c(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    with started("serve", "--rdzv-endpoint", endpoint, "--state-dir", str(tmp_path)) as server:
        assert server.stderr is not None
        assert any("serving at" in line for line in server.stderr)
        os.kill(server.pid, signal.SIGINT)
        os.kill(server.pid, signal.SIGTERM)
        _, log = server.communicate(timeout=PATIENCE_S)
    assert server.returncode == 0
    assert "SIGTERM received" in log
    assert "SIGINT received" not in log
