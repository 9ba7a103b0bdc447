"""Signals that were ignored when the agent was started: by ``nohup``, or by a script that runs it with ``&``."""

from __future__ import annotations

import signal
from pathlib import Path

from elastic_agent.exit_codes import ExitCode
from tests.agent.support import COMMAND, elastic_agent, started, training
from tests.ports import free_port

IGNORING = ["sh", "-c", 'trap "" HUP INT QUIT; exec "$@"', "sh"]
IGNORED = (signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)


def test_ignored_signals_stay_ignored_and_are_logged_once(tmp_path: Path) -> None:
    with training(tmp_path, command=[*IGNORING, *COMMAND]) as agent:
        for signum in IGNORED:
            agent.process.send_signal(signum)
        code, log = agent.end("\n")
    assert code == 0, log
    assert log.count("ignoring SIGINT, SIGHUP, SIGQUIT, which were ignored when this agent was started") == 1
    assert "the run finished" in log


def test_an_ignored_signal_that_is_configured_is_handled(tmp_path: Path) -> None:
    with training(tmp_path, "--signals-to-handle", "SIGHUP", command=[*IGNORING, *COMMAND]) as agent:
        agent.process.send_signal(signal.SIGHUP)
        code, log = agent.end()
    assert code == ExitCode.STOPPED, log
    assert "SIGHUP received" in log
    assert "ignoring" not in log


def test_the_settings_list_the_remaining_signals() -> None:
    done = elastic_agent("settings", under=IGNORING)
    assert 'signals_to_handle = "SIGTERM"  ' in done.stdout
    assert "# default, without SIGINT, SIGHUP, SIGQUIT: ignored when the agent was started" in done.stdout


def test_a_background_server_of_a_script_survives_ctrl_c(tmp_path: Path) -> None:
    endpoint = f"localhost:{free_port()}"
    argv = ["serve", "--rdzv-endpoint", endpoint, "--state-dir", str(tmp_path)]
    with started(*argv, command=[*IGNORING, *COMMAND]) as server:
        server.log_until("serving at")
        server.process.send_signal(signal.SIGINT)
        server.process.terminate()
        code, log = server.end()
    assert code == 0
    assert "SIGTERM received" in log
    assert "SIGINT received" not in log
