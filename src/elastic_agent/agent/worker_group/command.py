"""The command a worker runs, and the versions of what runs."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from elastic_agent import installed_version
from elastic_agent.agent.slurm.job import SlurmJob
from elastic_agent.config.settings import Settings
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Fingerprint, Job

LONGEST_COMMAND = 500
"""Characters of a command that messages show."""

LOCAL_RANK_MACRO = "${local_rank}"
"""torch's macro in worker arguments."""


def worker_command(settings: Settings, slot: int) -> tuple[str, ...]:
    """Return program and arguments for the worker in ``slot``, as torchrun would start it."""
    arguments = tuple(argument.replace(LOCAL_RANK_MACRO, str(slot)) for argument in settings.script_args)
    if settings.runs_program:
        return (settings.script, *arguments)
    python = settings.python_exec or sys.executable
    if settings.runs_module:
        return (python, "-u", "-m", settings.script, *arguments)
    return (python, "-u", settings.script, *arguments)


def command_on_this_machine(settings: Settings) -> str:
    """Return the script, with its folder, and its arguments; of a very long line the first part and a digest."""
    script = settings.script
    if not (settings.runs_module or settings.runs_program):
        script = os.path.realpath(script)
    command = shlex.join((*(("-m",) if settings.runs_module else ()), script, *settings.script_args))
    if settings.runs_module:
        command += f" (in {os.getcwd()})"
    if len(command) <= LONGEST_COMMAND:
        return command
    return f"{command[:LONGEST_COMMAND]}… ({hashlib.sha256(os.fsencode(command)).hexdigest()[:8]})"


def job_of(settings: Settings, scheduled: SlurmJob | None) -> Job:
    """Return what the run is started for. Folders do not count: they may differ between machines."""
    arguments = (os.path.basename(settings.script), *settings.script_args)
    digest = hashlib.sha256(b"\0".join(map(os.fsencode, arguments))).hexdigest()[:32]
    if scheduled is None:
        return Job((digest,))
    return Job((digest,), scheduled.id, scheduled.requeues)


def job_fingerprint(settings: Settings) -> str:
    """Return what distinguishes jobs that share an endpoint without a run id, by the script's name and content.

    The same script gives the same fingerprint on every machine, wherever it lies there.
    """
    digest = hashlib.sha256(os.fsencode(os.path.basename(settings.script)))
    if not settings.runs_module:
        try:
            digest.update(Path(settings.script).read_bytes())
        except OSError:
            digest.update(b"-")  # for example a program found on PATH
    return digest.hexdigest()[:32]


def fingerprint(settings: Settings) -> Fingerprint:
    """Return script, Python, torch and package version of this node."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    return Fingerprint(
        job_fingerprint(settings),
        platform.python_version(),
        torch_version,
        installed_version(),
        without_surrogates(Path(settings.script).name),
    )
