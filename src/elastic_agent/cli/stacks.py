"""``elastic-agent stacks [RUN]``: have the workers of this machine write their Python stacks, and go on."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Sequence

from elastic_agent.cli.arguments import CommandParser, check_one_run, name_of
from elastic_agent.config.errors import UsageError
from elastic_agent.exit_codes import ExitCode
from elastic_agent.linux import catches, is_frozen
from elastic_agent.printable import escaped
from elastic_agent.workers.find_workers import RunningWorker, find_workers

APART_S = 0.1
"""Between workers that share an output, so that their stacks seldom mix; each begins with the name of its worker."""

PAGE = """\
Usage: elastic-agent stacks [RUN] [--user USER]

Makes every worker of a run on this machine write the Python stacks of all its threads to its standard error: its log
file if output is redirected, otherwise the output of its agent. The workers keep running. RUN can be left out if this
user has workers of only one run on this machine.
Warm workers support this; cold workers (--worker-start), and those that have executed themselves again, do if their
script has imported elastic_agent.client. Others are listed and left alone, as are those that are stopped (SIGSTOP).

  --user USER   the workers of this user (for root)"""


def stacks(argv: Sequence[str]) -> int:
    """Request the stacks of the workers, and print a line for each.

    Raises:
        UsageError: more than a run's name was given, no worker is found, or workers of several runs are.
    """
    parser = CommandParser("stacks", PAGE, expected="at most one run id", most_words=1)
    parser.select_agents()
    given = parser.read(argv)
    run_id = given.words[0] if given.words else given.run
    uid = os.geteuid() if given.user is None else given.user
    workers = find_workers(uid, run_id)
    if not workers:
        whose = f"of run {run_id} " if run_id else ""
        raise UsageError(
            f"stacks: no running worker {whose}of user {name_of(uid)} found on this machine; run the "
            "command where the agent runs, as the same user (or as root, with --user)"
        )
    check_one_run(
        "stacks", (worker.run_id for worker in workers), of="workers", select="elastic-agent stacks RUN"
    )
    for number, worker in enumerate(workers):
        if number > 0 and worker.shares_output:
            time.sleep(APART_S)
        result = f"{worker.run_id}  {worker.worker_id}  pid {worker.pid}  {_request(worker)}"
        print(escaped(result), flush=True)
    return ExitCode.FINISHED


def _request(worker: RunningWorker) -> str:
    if is_frozen(worker.pid):
        return (
            f"not possible: stopped by a signal or a debugger (state T); kill -CONT {worker.pid} continues it"
        )
    if not catches(worker.pid, worker.stacks_signal):
        how = "started cold, or executed itself again (exec)"
        return f"not possible: {how}, and its script has not imported elastic_agent.client"
    if worker.shares_output:
        _label(worker)
    try:
        os.kill(worker.pid, worker.stacks_signal)
    except OSError as error:
        return f"not possible: {error.strerror}"
    return f"requested, see {worker.output or 'its standard error'}"


def _label(worker: RunningWorker) -> None:
    """Write the worker's name into its standard error: stacks alone do not say whose they are."""
    # Root writes to nothing that another user's process calls its standard error: it could be any file.
    with contextlib.suppress(OSError):
        if os.stat(f"/proc/{worker.pid}").st_uid != os.geteuid():
            return
        fd = os.open(f"/proc/{worker.pid}/fd/2", os.O_WRONLY | os.O_NONBLOCK | os.O_NOCTTY)
        try:
            os.write(fd, escaped(f"stacks of worker {worker.worker_id} (pid {worker.pid}):").encode() + b"\n")
        finally:
            os.close(fd)
