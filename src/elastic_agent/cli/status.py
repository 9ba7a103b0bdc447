"""``elastic-agent status`` and ``elastic-agent why``: how a run is, and why its generations failed."""

from __future__ import annotations

import asyncio
import os
import sys
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from elastic_agent.cli.arguments import HOW_TO_ASK, ONE_RUN, CommandParser, agents_of, check_one_run, no_agent
from elastic_agent.config.directories import default_state_dir
from elastic_agent.config.errors import UsageError
from elastic_agent.config.value_types import PATH, whole_number
from elastic_agent.exit_codes import ExitCode
from elastic_agent.printable import duration, escaped

if TYPE_CHECKING:
    from elastic_agent.monitoring.status import GenerationStatus, RunStatus, Standstill

WATCH_EVERY_S = 2.0
SHOWN_RUNS = 5
"""So many runs are named to a user who asks for another one, the newest."""

NO_AGENT = "no agent of the run answers on this machine"

STATUS_PAGE = """\
Usage: elastic-agent status [RUN] [--json] [--watch]

Shows the status of the runs that have an agent on this machine, or of one run: phase, nodes, workers, training steps,
restarts, and what the run is waiting for. If no agent runs here, shows the last status that an agent of this machine
saved. Run the command on any machine of the run, as the user who runs the agents or as root.

  --json            one JSON object per run
  --watch           repeat every 2 seconds, until the run has ended"""

WHY_PAGE = """\
Usage: elastic-agent why [RUN] [--generation N] [--json]

Prints why the generations of a run failed: for each one which worker failed first, why, and what to do. Works while the
run continues and after it has ended, on any machine of the run, as the user who runs the agents or as root.

  --generation N    this generation only
  --json            one JSON object per generation"""

OPTIONS_PAGE = """
  --state-dir DIR   where agents that have ended saved the status [default: the state directory of the agents]
  --user USER       only agents of this user (for root)"""


def status(argv: Sequence[str]) -> int:
    """Show the status of runs; raises ``UsageError`` or ``HelpRequested``."""
    parser = _parser("status", STATUS_PAGE)
    parser.add("--watch", action="store_true")
    given = _read(parser, argv)
    while True:
        found = _find("status", given)
        if given.watch and not given.json and sys.stdout.isatty():
            print("\x1b[H\x1b[2J", end="")
        for number, run in enumerate(found):
            if number and not given.json:
                print()
            _show_status(run, as_json=given.json)
        if not given.watch or all(run.is_saved or run.status.is_over for run in found):
            return ExitCode.FINISHED
        time.sleep(WATCH_EVERY_S)


def why(argv: Sequence[str]) -> int:
    """Print the root causes of a run's failures; raises ``UsageError`` or ``HelpRequested``."""
    parser = _parser("why", WHY_PAGE)
    parser.add("--generation", whole_number(0))
    given = _read(parser, argv)
    found = _find("why", given)
    check_one_run("why", [known.status.run_id for known in found], "elastic-agent why RUN")
    run, wanted = found[0].status, given.generation
    chosen = [known for known in run.generations if wanted in (None, known.generation)]
    if wanted is not None and not chosen:
        numbers = [str(known.generation) for known in run.generations] or ["none"]
        listed = ", ".join(numbers) if len(numbers) <= 3 else f"{numbers[0]} to {numbers[-1]}"
        raise UsageError(
            f"why: generation {wanted} of run {run.run_id} is not known on this machine; known are {listed}"
        )
    if given.json:
        import msgspec

        for generation in chosen:
            print(msgspec.json.encode(generation).decode())
    else:
        print(escaped("\n\n".join(_causes(found[0], chosen, wanted)), keep_lines=True), flush=True)
    return ExitCode.FINISHED


def _causes(found: Found, chosen: Sequence[GenerationStatus], wanted: int | None) -> list[str]:
    """Return why these generations failed, and what keeps the present one from going on."""
    from elastic_agent.diagnosis.cause import folded
    from elastic_agent.monitoring.status_text import problem_text

    run = found.status
    texts = folded(
        (generation.generation, _cause(generation))
        for generation in chosen
        if generation.cause or generation.failed
    )
    is_present = wanted in (None, run.generation)
    if run.problem and is_present:
        texts.append(problem_text(run))
    if run.standstill is not None and is_present:
        texts.append(_standstill(run, run.standstill))
    if not texts:
        texts = [f"run {run.run_id}: no generation has failed, as far as is known on this machine{_gap(run)}"]
    if found.is_saved and not run.is_over:
        texts.append(_age(run))
    return texts


def _standstill(run: RunStatus, standstill: Standstill) -> str:
    from elastic_agent.monitoring.status_text import standstill_text

    text = f"generation {run.generation}: {standstill_text(standstill, run.asked_s)}"
    return f"{text}\nwhere the workers are:\n{standstill.stacks}"


def _gap(run: RunStatus) -> str:
    """Return which generations are not known here, as this machine joined later, and who may know more."""
    first = run.generations[0] if run.generations else None
    others = [node for node in first.nodes if node != run.node_id] if first is not None else []
    if first is None or first.generation == 1 or not others:
        return ""
    return f", which knows none before generation {first.generation}; run this command on {others[0]}"


def _cause(generation: GenerationStatus) -> str:
    """Return the report on its root cause; without one, why it ended, such as that the store was lost."""
    where = f"\nwhere the workers were:\n{generation.stacks}" if generation.stacks else ""
    return f"{generation.cause or generation.end_words}{where}"


def _age(run: RunStatus) -> str:
    """Return how old a status is that an agent saved, and who knows more."""
    from elastic_agent.protocol import names

    age = f"{duration(time.time() - run.asked_s)} ago"
    if run.serves:  # which of both is the case is not known here
        return (
            f"node {run.node_id} left the run {age}, and its agent stayed to serve the store to {names(run.serves)}: "
            "keep it and its machine running; if it has ended while the run goes on, start the same command there again"
        )
    is_told = run.left and run.phase  # by the first line of the status
    last = run.generations[-1].nodes if run.generations and not is_told else ()
    others = [node for node in last if node != run.node_id]
    where = (
        f"; for its present status, run this command on another node, such as {others[0]}" if others else ""
    )
    again = "" if run.left else "; if it was killed, start the same command here again"
    return f"{NO_AGENT}; this was known {age}{where}{again}"


def _parser(command: str, page: str) -> CommandParser:
    parser = CommandParser(command, page + OPTIONS_PAGE, expected=ONE_RUN, most_words=1)
    parser.select_agents()
    parser.add("--state-dir", PATH)
    parser.add("--json", action="store_true")
    return parser


def _read(parser: CommandParser, argv: Sequence[str]) -> Namespace:
    given = parser.read(argv)
    given.state_dir = given.state_dir or default_state_dir(os.environ)
    return given


@dataclass(frozen=True)
class Found:
    """A status, and where it comes from."""

    status: RunStatus
    is_saved: bool
    """It was saved by an agent that has ended, or does not answer."""


def _find(command: str, given: Namespace) -> list[Found]:
    """Return one for each run: from a running agent, else the last one saved, and then only for the newest run.

    Raises:
        UsageError: there is none.
    """
    from elastic_agent.agent.reporting.status_files import saved_statuses

    live = asyncio.run(_ask(given))
    if live:
        return [Found(run, is_saved=False) for run in live]
    saved = saved_statuses(given.state_dir, given.run)
    if not saved:
        others = [*dict.fromkeys(escaped(run.run_id) for run in saved_statuses(given.state_dir))]
        have = f"; there are saved statuses of {', '.join(others[:SHOWN_RUNS])}" if others else ""
        which = " of that run" if given.run else ""
        raise UsageError(
            f"{command}: {asyncio.run(no_agent(given))}, and no saved status{which} in {given.state_dir} "
            f"(--state-dir){have}; {HOW_TO_ASK}"
        )
    return [Found(saved[0], is_saved=True)]


async def _ask(given: Namespace) -> list[RunStatus]:
    """Return the status of each run, from one of its agents here."""
    from elastic_agent.agent.control.socket import Command, command

    found = await agents_of(given)
    statuses: dict[str, RunStatus] = {}
    # In the order of the nodes, so that several agents of a run do not take turns with --watch.
    for address, agent in sorted(found.items(), key=lambda item: (item[1].run_id, item[1].node, item[0].pid)):
        if agent.run_id in statuses:
            continue
        try:
            async for answer in command(address, Command("status")):
                if answer.status is not None:
                    statuses[agent.run_id] = answer.status
        except (OSError, ValueError):
            continue  # it has exited, or is not an agent; another one of the run may answer
    return list(statuses.values())


def _show_status(found: Found, *, as_json: bool) -> None:
    from elastic_agent.monitoring.status import of_ended_agent
    from elastic_agent.monitoring.status_text import status_text

    run = of_ended_agent(found.status) if found.is_saved else found.status
    if as_json:
        import msgspec

        print(msgspec.json.encode(run).decode(), flush=True)
        return
    text = status_text(run, time.time())
    if found.is_saved:
        text = f"{text}\n{NO_AGENT} any more" if run.is_over else f"{text}\n{_age(run)}"
    print(escaped(text, keep_lines=True), flush=True)
