"""Runs on a host of ``--hosts``, as ssh's command: starts an agent in a session of its own, and shows its log."""

from __future__ import annotations

import atexit
import codecs
import contextlib
import fcntl
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import BinaryIO

import msgspec

from elastic_agent import linux
from elastic_agent.config.directories import make_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import load_settings
from elastic_agent.exit_codes import ExitCode
from elastic_agent.files import all_but_newest, locked
from elastic_agent.workers.guard.kept_output import PARTS
from elastic_agent.workers.output.folders import KEPT_RUNS
from elastic_agent.workers.output.tee import Follower

AGENT = (sys.executable, "-P", "-m", "elastic_agent")

LOG_BYTES = 16 * 1024**2
"""The space for the log of an agent and its workers, as for a worker's output.log without --log-limit."""

CHECK_EVERY_S = 5.0
"""The log may exceed its space by what is written in this time."""

REMOVED_HERE = b"\n[elastic-agent: output was removed here]\n"

_STAT_BLOCK_BYTES = 512

logger = logging.getLogger(__name__)


class Order(msgspec.Struct):
    """A start that a terminal orders. The answer is a line of the token and the problem. More options start it."""

    token: str
    directory: str
    options: list[str]
    script: list[str]
    variables: dict[str, str]
    run_id: str


def main() -> int:
    """Do what the module describes. Returns the agent's exit code."""
    atexit.register(os._exit, ExitCode.INTERNAL)  # after an error: a thread may still read standard input
    sys.stdout = open(1, "w", encoding="utf-8", errors="surrogateescape", closefd=False)  # noqa: SIM115
    order = msgspec.json.decode(sys.stdin.buffer.readline(), type=Order)
    try:
        log = _examine(order)
    except (UsageError, OSError) as error:
        is_missing = getattr(error, "filename", None) == order.directory
        expected = "; expected the same folders on every host" * is_missing
        print(f"{order.token}{error}{expected}", flush=True)
        return ExitCode.USAGE
    print(order.token, flush=True)
    options = sys.stdin.buffer.readline()
    if options in (b"", b"stop\n"):  # the start is given up
        if not os.fstat(log.fileno()).st_size:
            _remove(Path(log.name))
        return ExitCode.INTERRUPTED
    log.truncate(0)
    # A thread: a file system may hang, and so may the reader of what this one shows.
    threading.Thread(target=limit_log, args=(log.name,), daemon=True).start()
    words = [*AGENT, "run", *order.options, *msgspec.json.decode(options), *order.script]
    agent = subprocess.Popen(words, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True)
    threading.Thread(target=_obey, args=(agent, order.run_id), daemon=True).start()
    follower = Follower(log.name, "", _show)
    follower.decoder = codecs.getincrementaldecoder("utf-8")("surrogateescape")
    while True:
        code = agent.poll()  # before the rest is read
        follower.advance(time.monotonic(), ends=code is not None)
        if code is not None:
            return code if code >= 0 else 128 - code
        time.sleep(0.1)


def _examine(order: Order) -> BinaryIO:
    """Enter the folder, and check the settings there; returns the file for the agent's log."""
    os.chdir(order.directory)
    path = os.pathsep.join((os.path.dirname(sys.executable), os.environ.get("PATH", os.defpath)))
    os.environ.update({"PATH": path, "PWD": order.directory, **order.variables})
    settings = load_settings([*order.options, *order.script], os.environ).settings
    make_state_dir(settings.state_dir, os.environ)
    folder = settings.state_dir / "hosts" / order.run_id
    folder.mkdir(parents=True, exist_ok=True)
    log = (folder / f"{os.uname().nodename}.log").open("ab")  # machines may share a home
    try:
        fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)  # kept by the agent, whose output this is
    except BlockingIOError:
        raise UsageError(f"run {order.run_id} runs here", "wait for its end, or elastic-agent stop") from None
    logs = folder.parent.glob(f"run-{8 * '[0-9a-f]'}/{os.path.basename(log.name)}")  # those without --rdzv-id
    for _, old in all_but_newest(logs, KEPT_RUNS):
        with contextlib.suppress(OSError), locked(old):
            _remove(old)
    return log


def _remove(log: Path) -> None:
    """Remove a log, and its folder if no other machine has a log there."""
    with contextlib.suppress(OSError):
        log.unlink()
        log.parent.rmdir()


def limit_log(path: str, limit_bytes: int = LOG_BYTES, check_every_s: float = CHECK_EVERY_S) -> None:
    """Keep the first third of the limit and the end of a log whenever it takes more, until it is removed.

    The agent and its workers append to it meanwhile: so it keeps its length, and its middle becomes a hole, which takes
    no space and reads as zeros.
    """
    is_told = False
    while True:
        try:
            take_out_middle(path, limit_bytes)
        except FileNotFoundError:
            return
        except OSError as error:
            if not is_told:
                logger.warning("cannot limit the size of %s: %s", path, error.strerror)
            is_told = True
        time.sleep(check_every_s)


def take_out_middle(path: str, limit_bytes: int) -> None:
    """Give back the space of what is neither in the first nor in the last third of the limit, if more is taken.

    Raises:
        OSError: the file is not there, or its file system makes no holes.
    """
    known = os.stat(path)
    part_bytes = limit_bytes // PARTS
    end = known.st_size - part_bytes
    if known.st_blocks * _STAT_BLOCK_BYTES <= limit_bytes or end <= part_bytes:
        return
    # Not with O_APPEND, which would make the write below an append.
    handle = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        linux.punch_hole(handle, part_bytes, end - part_bytes)
        os.pwrite(handle, REMOVED_HERE[: end - part_bytes], part_bytes)
    finally:
        os.close(handle)


def _show(_: str, line: str) -> None:
    with contextlib.suppress(OSError):  # the connection is gone, as the other thread sees
        print(line, flush=True)


def _obey(agent: subprocess.Popen[bytes], run_id: str) -> None:
    """Do what the terminal says, until it is gone."""
    stop = threading.Thread(target=_stop, args=(agent, run_id), daemon=True)
    for line in sys.stdin.buffer:
        if line == b"stop\n":
            stop.start()  # it is sent once
        else:  # a second signal ends it at once
            agent.send_signal(signal.SIGTERM)
            agent.send_signal(signal.SIGINT)


def _stop(agent: subprocess.Popen[bytes], run_id: str) -> None:
    words = [*AGENT, "stop", "--run", run_id]
    done = subprocess.run(words, stdin=subprocess.DEVNULL, capture_output=True, check=False)
    if done.returncode == ExitCode.USAGE:  # the agent does not listen yet
        agent.terminate()
