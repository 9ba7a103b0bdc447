"""``elastic-agent drain`` and ``elastic-agent stop``: have an agent of this machine shut workers down gracefully."""

from __future__ import annotations

import asyncio
import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from typing import TYPE_CHECKING

from elastic_agent.cli.arguments import HOW_TO_ASK, CommandParser, agents_of, check_one_run, name_of, no_agent
from elastic_agent.config.directories import default_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.value_types import seconds
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped

if TYPE_CHECKING:
    from elastic_agent.agent.control.socket import AgentAddress, Answer

_OPTIONS = """\

  --run RUN            the run, if several have agents on this machine
  --deadline SECONDS   when to stop workers that have not exited yet, from now [default: from the agent's settings]
  --user USER          only agents of this user (for root, if several users run agents on this machine)"""

DRAIN_PAGE = f"""\
Usage: elastic-agent drain [NODE] [--run RUN] [--deadline SECONDS]

Gracefully removes a node from its run: all workers of the run get a notice (client.notice), save and exit; then the
other nodes continue without that node. NODE defaults to this machine's node. The command returns when the last worker
process of the node has exited and the machine can be rebooted (exit code 0), or when that cannot be confirmed (exit
code 7). The node's agent exits with code 6. If no other node is left, the run is stopped, and the agent exits with
code 75. Run the command on any machine of the run, as the user who runs the agents or as root.
{_OPTIONS}"""

STOP_PAGE = f"""\
Usage: elastic-agent stop [--run RUN] [--deadline SECONDS]

Gracefully shuts down a run on all nodes: all workers get a notice (client.notice), save and exit; the agents exit with
code 75. To resume the run, start it again with the same run id. The command returns when the last worker process of
every node has exited (exit code 0), or when that cannot be confirmed (exit code 7). Run the command on any machine of
the run, as the user who runs the agents or as root.
{_OPTIONS}"""


def drain(argv: Sequence[str]) -> int:
    """Have a node leave; raises ``UsageError`` or ``HelpRequested``."""
    return _run("drain", CommandParser("drain", DRAIN_PAGE, expected="at most one node", most_words=1), argv)


def stop(argv: Sequence[str]) -> int:
    """Have a run end; raises ``UsageError`` or ``HelpRequested``."""
    return _run("stop", CommandParser("stop", STOP_PAGE), argv)


def _run(do: str, parser: CommandParser, argv: Sequence[str]) -> int:
    parser.select_agents()
    parser.add("--deadline", seconds(0))
    given = parser.read(argv)
    return asyncio.run(_carry_out(do, given.words[0] if given.words else None, given))


async def _carry_out(do: str, node: str | None, given: Namespace) -> int:
    # Imported here: the other commands answer with the standard library alone.
    from elastic_agent.agent.control.socket import Command, command

    found = await agents_of(given)
    if not found:
        raise UsageError(f"{do}: {await no_agent(given)}; {_end_of(given.run) or HOW_TO_ASK}")
    agent = _choose(do, node, found)
    if agent.uid != os.geteuid():
        print(f"connecting to the agent of user {name_of(agent.uid)} (pid {agent.pid})", flush=True)
    reason = f"elastic-agent {do} by {name_of(os.getuid())}"
    last: Answer | None = None
    with contextlib.suppress(OSError, ValueError):  # it has exited, or is not an agent
        async for last in command(agent, Command(do, node, given.deadline, reason)):
            print(escaped(last.text), file=sys.stderr if last.failed else sys.stdout, flush=True)
    if last is None:
        raise UsageError(f"{do}: the agent (pid {agent.pid}) exited before it answered; check its log")
    if not last.done:
        whose = node or ("this machine" if do == "drain" else "every node")
        print(
            f"elastic-agent: {do}: the agent (pid {agent.pid}) exited before it could confirm that the workers of "
            f"{whose} have exited; check for remaining worker processes there before you continue",
            file=sys.stderr,
            flush=True,
        )
    if last.unconfirmed or not last.done:
        return ExitCode.NOT_STOPPED
    return ExitCode.USAGE if last.failed else ExitCode.FINISHED


def _end_of(run_id: str | None) -> str:
    """Return how this run, or else the newest one of this user, has ended; "" if it has not, or nothing is known."""
    from elastic_agent.agent.reporting.status_files import saved_statuses

    saved = saved_statuses(default_state_dir(os.environ), run_id)[:1]
    return "".join(f"run {escaped(run.run_id)} has {run.phase} already" for run in saved if run.is_over)


def _choose(do: str, node: str | None, found: dict[AgentAddress, Answer]) -> AgentAddress:
    """Return the agent to send the command to: the node's own if it is here, else any of the run."""
    users = {address.uid for address in found}
    if len(users) > 1:  # any user can pretend to run an agent of any run
        listed = ", ".join(sorted(map(name_of, users)))
        raise UsageError(
            f"{do}: several users run such agents on this machine ({listed}); select one with --user"
        )
    check_one_run(do, (answer.run_id for answer in found.values()), "--run")
    if do == "drain" and node is None and len(found) > 1:
        nodes = ", ".join(sorted(escaped(answer.node) for answer in found.values()))
        raise UsageError(f"drain: this machine has several nodes ({nodes}); name one")
    own = [address for address, answer in found.items() if answer.node == node]
    return (own or list(found))[0]
