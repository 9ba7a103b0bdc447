"""``elastic-agent drain`` and ``elastic-agent stop``: have an agent of this machine shut workers down gracefully."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from argparse import ArgumentError
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.parser import HelpRequested, Parser, name_of, uid_of
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped
from elastic_agent.values import LONGEST_TIME_S

if TYPE_CHECKING:
    from elastic_agent.agent.control.socket import AgentAddress, Answer

DRAIN_PAGE = """\
Usage: elastic-agent drain [NODE] [--run RUN] [--deadline SECONDS]

Gracefully removes a node from its run: all workers of the run get a notice (client.notice), save and exit; then the
other nodes continue without that node. NODE defaults to this machine's node. The command returns when the last worker
process of the node has exited and the machine can be rebooted (exit code 0), or when that cannot be confirmed (exit
code 7). The node's agent exits with code 6. If no other node is left, the run is stopped, and the agent exits with
code 75. Run the command on any machine of the run, as the user who runs the agents or as root.
"""

STOP_PAGE = """\
Usage: elastic-agent stop [--run RUN] [--deadline SECONDS]

Gracefully shuts down a run on all nodes: all workers get a notice (client.notice), save and exit; the agents exit with
code 75. To resume the run, start it again with the same run id. The command returns when the last worker process of
every node has exited (exit code 0), or when that cannot be confirmed (exit code 7). Run the command on any machine of
the run, as the user who runs the agents or as root.
"""

OPTIONS_PAGE = """\

  --run RUN            the run, if several have agents on this machine
  --deadline SECONDS   when to stop workers that have not exited yet, from now [default: from the agent's settings]
  --user USER          only agents of this user (for root, if several users run agents on this machine)"""


@dataclass(frozen=True)
class Request:
    """A command line."""

    node: str | None
    run_id: str | None
    left_s: float | None
    uid: int | None
    """Only agents of this user."""


def drain(argv: Sequence[str]) -> int:
    """Have a node leave; raises ``UsageError`` or ``HelpRequested``."""
    return _ask("drain", argv, DRAIN_PAGE)


def stop(argv: Sequence[str]) -> int:
    """Have a run end; raises ``UsageError`` or ``HelpRequested``."""
    return _ask("stop", argv, STOP_PAGE)


def _ask(do: str, argv: Sequence[str], page: str) -> int:
    if any(word in ("-h", "--help") for word in argv):
        raise HelpRequested(page + OPTIONS_PAGE)
    return asyncio.run(_carry_out(do, _parse(do, argv)))


def _parse(do: str, argv: Sequence[str]) -> Request:
    parser = Parser(add_help=False, allow_abbrev=False, exit_on_error=False)
    for option in ("--run", "--deadline", "--user"):
        parser.add_argument(option)
    parser.add_argument("words", nargs="*")
    try:
        found, unknown = parser.parse_known_intermixed_args(argv)
    except ArgumentError as error:
        raise UsageError(f"{do}: {error.argument_name} requires a value") from None
    if unknown := [word for word in (*unknown, *found.words) if word.startswith("-")]:
        option = quoted(unknown[0].partition("=")[0])
        raise UsageError(f"{do}: unknown option {option}; expected --run, --deadline or --user")
    if len(found.words) > (1 if do == "drain" else 0):
        expected = "at most one node" if do == "drain" else "no arguments other than options"
        raise UsageError(f"{do}: got {quoted(' '.join(found.words))}; expected {expected}")
    left_s = _seconds(do, found.deadline) if found.deadline else None
    uid = uid_of(do, found.user) if found.user else None
    return Request(found.words[0] if found.words else None, found.run or None, left_s, uid)


def _seconds(do: str, text: str) -> float:
    """Return how long until a deadline; raises ``UsageError``."""
    if not re.fullmatch(r"[0-9]+(\.[0-9]*)?", text):
        raise UsageError(f"{do}: --deadline: got {quoted(text)}; expected a number of seconds from now")
    return min(float(text), LONGEST_TIME_S)


async def _carry_out(do: str, wanted: Request) -> int:
    # Here and not above: the other commands answer with the standard library alone.
    from elastic_agent.agent.control.socket import Command, agents_here, command, describe_all

    found = await describe_all([one for one in agents_here() if wanted.uid in (None, one.uid)])
    agent = _choose(do, wanted, found)
    if agent.uid != os.geteuid():
        print(f"connecting to the agent of user {name_of(agent.uid)} (pid {agent.pid})", flush=True)
    words = f"elastic-agent {do} by {name_of(os.getuid())}"
    last: Answer | None = None
    try:
        async for last in command(agent, Command(do, wanted.node, wanted.left_s, words)):
            print(escaped(last.text), file=sys.stderr if last.failed else sys.stdout, flush=True)
    except (OSError, ValueError):
        pass  # it has exited, or is not an agent
    if last is None:
        raise UsageError(f"{do}: the agent (pid {agent.pid}) exited before it answered; check its log")
    if not last.done:
        whose = wanted.node or ("this machine" if do == "drain" else "every node")
        print(
            f"elastic-agent: {do}: the agent (pid {agent.pid}) exited before it could confirm that the "
            f"workers of {whose} have exited; check for remaining worker processes there before you "
            "continue",
            file=sys.stderr,
            flush=True,
        )
    if last.unconfirmed or not last.done:
        return ExitCode.NOT_STOPPED
    return ExitCode.USAGE if last.failed else ExitCode.FINISHED


def _choose(do: str, wanted: Request, found: dict[AgentAddress, Answer]) -> AgentAddress:
    """The agent to send the command to: the node's own if it is here, else any of the run."""

    of_run = {address: one for address, one in found.items() if wanted.run_id in (None, one.run_id)}
    if not of_run:
        whose = f"of run {wanted.run_id} " if wanted.run_id else ""
        raise UsageError(
            f"{do}: no running agent {whose}found on this machine for this user; run the command on a "
            "machine of the run, as the user who runs the agents, or as root"
        )
    users = {address.uid for address in of_run}
    if len(users) > 1:  # any user can pretend to run an agent of any run
        listed = ", ".join(sorted(map(name_of, users)))
        raise UsageError(
            f"{do}: several users run such agents on this machine ({listed}); select one with --user"
        )
    runs = sorted({escaped(one.run_id) for one in of_run.values()})
    if len(runs) > 1:
        raise UsageError(
            f"{do}: this machine has agents of several runs ({', '.join(runs)}); select one with --run"
        )
    if do == "drain" and wanted.node is None and len(of_run) > 1:
        nodes = ", ".join(sorted(escaped(one.node) for one in of_run.values()))
        raise UsageError(f"drain: this machine has several nodes ({nodes}); name one")
    own = [address for address, one in of_run.items() if one.node == wanted.node]
    return (own or list(of_run))[0]
