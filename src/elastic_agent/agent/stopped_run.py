"""Tells at a start without a run id which run of the same command was stopped on this machine, and how to resume it."""

from __future__ import annotations

import contextlib

from elastic_agent.agent.worker_group.command import command_on_this_machine
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Outcome
from elastic_agent.rendezvous.run_history import JobFiles
from elastic_agent.transport import StoreLostError, run_abandonable

from .local_node import LocalNode

DISK_S = 1.0
"""The time that the disk may take; what it does not tell or take in that time is left out."""


async def note_end(node: LocalNode, outcome: Outcome) -> None:
    """Note a run that was stopped, or forget the one before, as the command has finished since."""
    files, command = _files(node)
    with contextlib.suppress(OSError, StoreLostError):
        if outcome is Outcome.STOPPED:
            await run_abandonable(lambda: files.write(command, node.run_id), DISK_S)
        elif outcome is Outcome.FINISHED:
            await run_abandonable(lambda: files.remove(command), DISK_S)


async def tell_of_stopped_run(node: LocalNode) -> None:
    """Log how to resume the run of this command that was stopped last, unless the command has finished since."""
    files, command = _files(node)
    with contextlib.suppress(OSError, StoreLostError):
        stopped = await run_abandonable(lambda: files.run_of(command), DISK_S)
        if stopped not in (None, node.run_id):
            get_logger().info(
                f"run {stopped} of the same command was stopped before, and this is another run; to resume that one, "
                f"pass --rdzv-id {stopped}"
            )


def _files(node: LocalNode) -> tuple[JobFiles, str]:
    return JobFiles(node.settings.state_dir), f"stopped {command_on_this_machine(node.settings)}"
