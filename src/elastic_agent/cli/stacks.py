"""``elastic-agent stacks [RUN]``: have the workers of this machine write their Python stacks, and go on."""

from __future__ import annotations

import os
from collections.abc import Sequence

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.exit_codes import ExitCode
from elastic_agent.processes import catches
from elastic_agent.workers.living import LivingWorker, living_workers

PAGE = """\
Usage: elastic-agent stacks [RUN]

Has every worker of this machine, or of one run, write the Python stacks of all its threads to its standard
error (its log file, if output is redirected). The workers are not stopped. Warm workers can always do that; cold ones
(--worker-start) if their script has imported elastic_agent.client. The others are named and left alone.
"""


def stacks(argv: Sequence[str]) -> int:
    """Ask the workers, and print a line for each.

    Raises:
        UsageError: more than a run's name was given, or no worker is found.
    """
    if any(word in ("-h", "--help") for word in argv):
        print(PAGE, end="", flush=True)
        return ExitCode.FINISHED
    if len(argv) > 1 or any(word.startswith("-") for word in argv):
        raise UsageError(f"stacks: got {quoted(' '.join(argv))}; expected a run's id, or nothing")
    run_id = argv[0] if argv else None
    workers = living_workers(run_id)
    if not workers:
        whose = f"of run {run_id} " if run_id else ""
        raise UsageError(
            f"stacks: no worker {whose}runs on this machine, as far as this user can see; expected to be run "
            "where the agent runs, by the same user or root"
        )
    for worker in workers:
        print(f"{worker.run_id}  {worker.worker_id}  pid {worker.pid}  {_ask(worker)}", flush=True)
    return ExitCode.FINISHED


def _ask(worker: LivingWorker) -> str:
    if not catches(worker.pid, worker.stacks_signal):
        return "cannot: it was started cold, and its script has not imported elastic_agent.client"
    try:
        os.kill(worker.pid, worker.stacks_signal)
    except OSError as error:
        return f"cannot: {error.strerror}"
    return f"asked, see {worker.output or 'its standard error'}"
