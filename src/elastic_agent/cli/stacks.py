"""``elastic-agent stacks [RUN]``: have the workers of this machine write their Python stacks, and go on."""

from __future__ import annotations

import os
from argparse import ArgumentError
from collections.abc import Sequence

from elastic_agent.cli.users import name_of, uid_of
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.parser import HelpRequested, Parser
from elastic_agent.exit_codes import ExitCode
from elastic_agent.linux import catches
from elastic_agent.printable import escaped
from elastic_agent.workers.find_workers import RunningWorker, find_workers

PAGE = """\
Usage: elastic-agent stacks [RUN] [--user USER]

Makes every worker of this user on this machine, or of one run, write the Python stacks of all its threads to its
standard error: its log file if output is redirected, otherwise the output of its agent. The workers keep running.
Warm workers always support this; cold workers (--worker-start) do if their script has imported elastic_agent.client.
Others are listed and left alone.

  --user USER   the workers of this user (for root)"""


def stacks(argv: Sequence[str]) -> int:
    """Request the stacks of the workers, and print a line for each.

    Raises:
        UsageError: more than a run's name was given, or no worker is found.
    """
    if any(word in ("-h", "--help") for word in argv):
        raise HelpRequested(PAGE)
    run_id, uid = _parse(argv)
    workers = find_workers(uid, run_id)
    if not workers:
        whose = f"of run {run_id} " if run_id else ""
        raise UsageError(
            f"stacks: no running worker {whose}of user {name_of(uid)} found on this machine; run the "
            "command where the agent runs, as the same user (or as root, with --user)"
        )
    for worker in workers:
        what = f"{worker.run_id}  {worker.worker_id}  pid {worker.pid}  {_ask(worker)}"
        print(escaped(what), flush=True)
    return ExitCode.FINISHED


def _parse(argv: Sequence[str]) -> tuple[str | None, int]:
    parser = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    parser.add_argument("run", nargs="?")
    parser.add_argument("--run", dest="named")
    parser.add_argument("--user")
    try:
        found = parser.parse_intermixed_args(argv)
    except (ArgumentError, UsageError):
        raise UsageError(
            f"stacks: got {quoted(' '.join(argv))}; expected a run id, --user USER, or no arguments"
        ) from None
    return found.run or found.named, os.geteuid() if found.user is None else uid_of("stacks", found.user)


def _ask(worker: RunningWorker) -> str:
    if not catches(worker.pid, worker.stacks_signal):
        return "not possible: started cold, and its script has not imported elastic_agent.client"
    try:
        os.kill(worker.pid, worker.stacks_signal)
    except OSError as error:
        return f"not possible: {error.strerror}"
    return f"requested, see {worker.output or 'its standard error'}"
