"""``elastic-agent doctor [options of run] [SCRIPT]``: examine the machines of a run before it starts."""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import Resolved, resolve
from elastic_agent.config.script import check_module, check_working_directory
from elastic_agent.config.sources.command_line import CommandLine, parse_command_line
from elastic_agent.config.value_types import seconds
from elastic_agent.exit_codes import ExitCode
from elastic_agent.worker_variables import LAUNCH_FOLDER

from .run import start_agent

if TYPE_CHECKING:
    from elastic_agent.doctor.local import Request
    from elastic_agent.doctor.records import Local
    from elastic_agent.doctor.report import Report

DOCTOR_PAGE = """\
Usage: elastic-agent doctor [OPTIONS OF RUN] [--paths DIR,DIR] [--wait SECONDS] [--alone] [--json] [SCRIPT [ARGUMENTS]]

Examines the machines of a run before it starts. Run it on every machine at the same time, with the command of the run:

    elastic-agent doctor --rdzv-endpoint HOST:29400 --nnodes 4 train.py

Each machine first examines itself: endpoint, names, network interfaces, limits, folders, script, torch, GPUs.
Then the machines meet at the endpoint, compare versions, settings and environment, connect to each other, and perform
an all-reduce. All of them print the same report: problems with machine, cause and remedy, the worst first.
A run that uses the endpoint is not disturbed. The script is read, but not executed.

  --paths DIR,DIR   folders that all machines share (data, checkpoints): a file written on one is read on all
  --wait SECONDS    how long to wait for the other machines [default: 60]
  --alone           examine this machine only
  --json            print one JSON object

Exit codes
  0      no errors; there may be warnings
  1      errors were found
  2      usage error: nothing was examined
  3      fewer machines than --nnodes requires joined within --wait; those that did were examined
  4      the endpoint cannot be reached, what answers there is not a store of elastic-agent, or its connection broke
  70     internal error of elastic-agent: please report it"""

_JSON, _ALONE, _PATHS, _WAIT = "--json", "--alone", "--paths", "--wait"
_STOPPED = (ExitCode.STOPPED, ExitCode.DRAINED, ExitCode.INTERRUPTED)
"""The agent's exit codes after Ctrl-C."""
_WAIT_TIME = seconds(0, above=True, most=86400)


def doctor(argv: Sequence[str]) -> int:
    """Examine, print the report, and return the exit code.

    Raises:
        UsageError: the settings are wrong; nothing was examined.
    """
    line = parse_command_line(argv, switches=(_JSON, _ALONE), values=(_PATHS, _WAIT), page=DOCTOR_PAGE)
    check_working_directory()
    wait_s = _WAIT_TIME.read(line.values.get(_WAIT, "60"), f"doctor: {_WAIT}")
    resolved, script_error = _resolve(line)
    return _examine(line, wait_s, resolved, script_error)


def _resolve(line: CommandLine) -> tuple[Resolved, UsageError | None]:
    """Return the settings, and what is wrong with the script: the other machines are examined nevertheless."""
    try:
        resolved = resolve(line, os.environ, script_needed=False)
        if resolved.settings.runs_module and not resolved.settings.python_exec:
            check_module(resolved.settings.script)
        return resolved, None
    except UsageError as error:
        if line.script is None:
            raise
        without = replace(line, script=None, script_args=())
        return resolve(without, os.environ, script_needed=False), error


def _examine(line: CommandLine, wait_s: float, resolved: Resolved, script_error: UsageError | None) -> int:
    # Imported late: a mistake is to be answered at once.
    from elastic_agent.doctor.local import Request, examine_alone, stops_meeting
    from elastic_agent.doctor.report import as_json, as_text, report_alone
    from elastic_agent.name_lookups import shorten_lookups

    settings = resolved.settings
    shorten_lookups()
    paths = tuple(Path(os.path.abspath(path)) for path in line.values.get(_PATHS, "").split(",") if path)
    request = Request(settings=settings, environ=dict(os.environ), script_error=script_error, paths=paths)
    local = asyncio.run(examine_alone(request))
    meets_others = settings.nnodes.most > 1 and settings.rdzv_endpoint and _ALONE not in line.switches
    if not meets_others or stops_meeting(local.findings):
        report = report_alone(local, local.findings)
    else:
        report = _examine_together(request, local, wait_s)
    print(as_json(report) if _JSON in line.switches else as_text(report, request.machine), flush=True)
    return report.exit_code


def _examine_together(request: Request, local: Local, wait_s: float) -> Report:
    """Start a run with a probe on each machine; raises KeyboardInterrupt if it was stopped."""
    from elastic_agent.doctor.together import doctor_settings, read_report, report_failed_join, write_task
    from elastic_agent.launch_outcome import LaunchOutcome

    with tempfile.TemporaryDirectory(prefix="elastic-agent-doctor-") as name:
        folder = Path(name)
        write_task(request, local, folder)
        os.environ[LAUNCH_FOLDER] = name
        try:
            code = start_agent(Resolved(doctor_settings(request.settings, wait_s, folder), {}))
        except UsageError as refusal:
            return report_failed_join(local, ExitCode.FAILED, str(refusal), wait_s)
        outcome = LaunchOutcome.read(folder)
        reason = outcome.reason if outcome is not None else ""
        report = read_report(folder, wait_s)
        if report is None and code in _STOPPED:
            print(f"elastic-agent doctor: stopped{reason and f': {reason}'}", file=sys.stderr, flush=True)
            raise KeyboardInterrupt
        return report or report_failed_join(local, code, reason, wait_s)
