"""Runs on a host of ``--hosts``, as ssh's command: starts an agent in a session of its own, and shows its log."""

from __future__ import annotations

import fcntl
import os
import signal
import subprocess
import sys
import threading
import time
from typing import BinaryIO

import msgspec

from elastic_agent.config.directories import make_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import load_settings
from elastic_agent.exit_codes import ExitCode
from elastic_agent.workers.output.tee import Follower

AGENT = (sys.executable, "-P", "-m", "elastic_agent")


class Order(msgspec.Struct):
    """What to start where. The answer is a line of the token and what is wrong. More options start the agent."""

    token: str
    directory: str
    options: list[str]
    script: list[str]
    variables: dict[str, str]
    run_id: str


def main() -> int:
    """Do what the module describes. Returns the agent's exit code."""
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        log = _examine(order)
    except (UsageError, OSError) as error:
        expected = "" if isinstance(error, UsageError) else "; expected the same folders on every host"
        print(f"{order.token}{error}{expected}", flush=True)
        return ExitCode.USAGE
    print(order.token, flush=True)
    options = sys.stdin.buffer.readline()
    if options in (b"", b"stop\n"):  # the start is given up
        return ExitCode.INTERRUPTED
    log.truncate(0)
    words = [*AGENT, "run", *order.options, *msgspec.json.decode(options), *order.script]
    agent = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    threading.Thread(target=_obey, args=(agent, order.run_id), daemon=True).start()
    follower = Follower(log.name, "", lambda _, line: print(line))
    while True:
        code = agent.poll()  # before the rest is read
        follower.advance(time.monotonic(), ends=code is not None)
        sys.stdout.flush()
        if code is not None:
            return code if code >= 0 else 128 - code
        time.sleep(0.1)


def _examine(order: Order) -> BinaryIO:
    """Enter the folder, and check the settings there; returns the file for the agent's log."""
    os.chdir(order.directory)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    os.environ.update({"PATH": path, "PWD": order.directory, **order.variables})
    state_dir = load_settings([*order.options, *order.script], os.environ).settings.state_dir
    make_state_dir(state_dir, os.environ)
    folder = state_dir / "hosts" / order.run_id
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / f"{os.uname().nodename}.log").open("ab")  # machines may share a home
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept by the agent, whose output this is
    except BlockingIOError:
        raise UsageError(f"run {order.run_id} runs here", "wait for its end, or elastic-agent stop") from None
    return log


def _obey(agent: subprocess.Popen[bytes], run_id: str) -> None:
    """Do what the terminal says, and end with it: the agent goes on."""
    for line in sys.stdin.buffer:
        if line == b"stop\n":
            stop = f'"$@" >/dev/null 2>&1; [ $? != {ExitCode.USAGE:d} ] || kill {agent.pid}'  # it does not listen yet
            words = ["/bin/sh", "-c", stop, "sh", *AGENT, "stop", "--run", run_id]
            subprocess.Popen(words, stdin=subprocess.DEVNULL)
        else:  # a second signal ends it at once
            agent.send_signal(signal.SIGTERM)
            agent.send_signal(signal.SIGINT)
    os._exit(0)
