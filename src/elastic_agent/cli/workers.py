"""``elastic-agent logs`` and ``elastic-agent stacks``: what workers have written, and where they are."""

from __future__ import annotations

import asyncio
import os
import re
import sys
from argparse import Namespace
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import TYPE_CHECKING

from elastic_agent.cli.arguments import HOW_TO_ASK, ONE_RUN, CommandParser, agents_of_one_run, no_agent
from elastic_agent.config.directories import default_log_dir, default_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.value_types import PATH, whole_number
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import escaped

if TYPE_CHECKING:
    from elastic_agent.agent.control.socket import AgentAddress, Answer, Question

LOGS_PAGE = """\
Usage: elastic-agent logs [-f] [-n LINES] [--generation N] [--run RUN] [NODE[/SLOT]]

Prints what the workers of a run have written last: of all nodes, of one, or of one worker. Run the command on any
machine of the run, as the user who runs the agents or as root. Each machine tells at most the newest 256 KB at a time,
and how much it left out. When the run has ended, prints what lies on this machine.

  -f, --follow          go on with what is written, also in later generations, until the run ends
  -n, --lines LINES     begin with so many lines of each file [default: 20]
  --generation N        the workers of this generation [default: the latest]
  --run RUN             the run, if several have agents on this machine
  --log-dir DIR         print what lies in this log directory, and ask no agent
  --user USER           only agents of this user (for root)"""

STACKS_PAGE = """\
Usage: elastic-agent stacks [RUN] [--all-nodes] [--user USER]

Prints the Python stacks of the workers of a run on this machine, main thread first, last call last. The workers go on.
Those that have made a process group answer by themselves. Others, and those that are stuck in C code, write them to
their standard error, from where they are read if it goes to a file; cold workers (--worker-start) without a process
group only if their script has imported elastic_agent.client.

  --all-nodes   of the workers on all nodes
  --user USER   only agents of this user (for root)"""

_LINE_END = re.compile(r"\r?\n|\r")


def logs(argv: Sequence[str]) -> int:
    """Print the output of workers; raises ``UsageError`` or ``HelpRequested``."""
    parser = CommandParser("logs", LOGS_PAGE, expected="at most one NODE or NODE/SLOT", most_words=1)
    parser.select_agents()
    parser.add("-f", dest="follow", action="store_true")
    parser.add("--follow", action="store_true")
    for option in ("-n", "--lines"):
        parser.add(option, whole_number(0), dest="lines", default=20)
    parser.add("--generation", whole_number(1))
    parser.add("--log-dir", PATH)
    given = parser.read(argv)
    node, _, slot = given.words[0].partition("/") if given.words else ("", "", "")
    if slot and not (slot.isascii() and slot.isdecimal()):
        raise UsageError(f"logs: got {escaped(given.words[0])}; expected NODE or NODE/SLOT, such as n1/0")
    given.node, given.slot = node or None, int(slot) if slot else None
    asyncio.run(_logs(given))
    return ExitCode.FINISHED


async def _logs(given: Namespace) -> None:
    from elastic_agent.agent.control.socket import Question

    found = await agents_of_one_run("logs", given) if given.log_dir is None else {}
    if not found:
        await _print_files(given)
        return
    question = Question("logs", given.slot, given.generation, given.lines, follows=given.follow)
    noted: set[str] = set()
    is_empty = not given.follow
    async for answer in _answers(next(iter(found)), given.node, question):
        _print_output(given, answer.output)
        is_empty = is_empty and not answer.output
        if answer.text and answer.text not in noted:
            noted.add(answer.text)
            print(escaped(f"elastic-agent: {answer.text}"), flush=True)
    if is_empty and not noted:
        wanted = given.words[0] if given.words else "any worker"
        where = f" in generation {given.generation}" if given.generation else ""
        raise UsageError(
            f"logs: no output of {wanted}{where}", "elastic-agent status lists nodes and generations"
        )


async def _print_files(given: Namespace) -> None:
    """Print what lies on this machine; raises ``UsageError`` if that is nothing."""
    from elastic_agent.workers.output.folders import run_folder
    from elastic_agent.workers.output.read_output import newest_generation, read_output

    log_dir = given.log_dir or default_log_dir(default_state_dir(os.environ))
    folder = run_folder(str(log_dir), given.run) if given.run else log_dir / "latest"
    worker = given.node, given.slot, given.generation
    output, _ = read_output(folder, {}, *worker, last_lines=given.lines)
    if not output:
        found = await no_agent(given)
        where = f"{folder} (--log-dir)" if given.run else f"{folder} (--log-dir; for another run, --run ID)"
        raise UsageError(f"logs: {found}, and no such output in {where}; {HOW_TO_ASK}")
    generation = given.generation or newest_generation(folder)
    of = f"no agent was asked; this is of generation {generation} in {os.path.realpath(folder)}"
    print(escaped(f"elastic-agent: {of}"), file=sys.stderr, flush=True)
    _print_output(given, output)


def _print_output(given: Namespace, output: Mapping[str, str]) -> None:
    for worker, text in output.items():
        head = f"{worker} | " if given.slot is None else ""
        for line in _LINE_END.split(text)[:-1]:
            print(escaped(f"{head}{line}", keep_lines=True), flush=True)


def stacks(argv: Sequence[str]) -> int:
    """Print the stacks of workers; raises ``UsageError`` or ``HelpRequested``."""
    parser = CommandParser("stacks", STACKS_PAGE, expected=ONE_RUN, most_words=1)
    parser.select_agents()
    parser.add("--all-nodes", action="store_true")
    asyncio.run(_stacks(parser.read(argv)))
    return ExitCode.FINISHED


async def _stacks(given: Namespace) -> None:
    from elastic_agent.agent.control.socket import Question

    found = await agents_of_one_run("stacks", given)
    if not found:
        raise UsageError(f"stacks: {await no_agent(given)}; {HOW_TO_ASK}")
    addresses = sorted(found, key=lambda address: found[address].node)[: 1 if given.all_nodes else None]
    for address in addresses:
        node = None if given.all_nodes else found[address].node
        async for answer in _answers(address, node, Question("stacks")):
            if answer.text:
                print(f"{escaped(answer.text, keep_lines=True)}\n", flush=True)


async def _answers(address: AgentAddress, node: str | None, question: Question) -> AsyncIterator[Answer]:
    """Yield what an agent answers about the workers of a node, or (None) of all; ends when the agent does.

    Raises:
        UsageError: there is no such node, or the agent does not know the question.
    """
    from elastic_agent.agent.control.socket import Command, command

    try:
        async for answer in command(address, Command("ask", node, question=question)):
            if answer.failed:
                raise UsageError(f"{question.do}: {answer.text}")
            yield answer
    except (ConnectionError, ValueError):
        return  # it has exited, or is not an agent
