"""Arguments of commands other than ``run``: parsed with errors in one line, and which agents and runs they select."""

from __future__ import annotations

import os
import pwd
from argparse import ArgumentError, Namespace
from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from elastic_agent.config.errors import BadValueError, HelpRequested, UsageError, did_you_mean, quoted
from elastic_agent.config.sources.command_line import Parser
from elastic_agent.config.value_types import TEXT, Kind
from elastic_agent.printable import escaped

if TYPE_CHECKING:
    from elastic_agent.agent.control.socket import AgentAddress, Answer


ONE_RUN = "at most one run id"


class CommandParser(Parser):
    """A parser for one command, whose options have values of the same kinds as settings."""

    def __init__(
        self,
        command: str,
        page: str,
        *,
        expected: str = "no arguments other than options",
        most_words: int = 0,
    ) -> None:
        """Prepare for a command that takes at most ``most_words`` words besides options; ``expected`` says it."""
        super().__init__(add_help=False, allow_abbrev=False, exit_on_error=False)
        self._command = command
        self._page = page
        self._expected = expected
        self._most_words = most_words
        self._names_run = expected == ONE_RUN
        self._options: list[str] = []
        self.add_argument("words", nargs="*")

    def add(self, option: str, kind: Kind | None = None, **more: Any) -> None:
        """Accept an option: with a value of this kind, else with any text, or as ``more`` tells argparse."""
        self._options.append(option)
        if kind is not None:
            more["type"] = partial(kind.read, source=f"{self._command}: {option}")
        self.add_argument(option, **more)

    def select_agents(self) -> None:
        """Accept the options that select agents of this machine; with ``ONE_RUN``, the run may be a word, too."""
        self.add("--run", TEXT)
        self.add("--user", USER)

    def read(self, argv: Sequence[str]) -> Namespace:
        """Parse the words after the command; ``words`` of the result are those that belong to no option.

        Raises:
            HelpRequested: the command's page is wanted.
            UsageError: an option is unknown or has no value or a wrong one, or there are too many words.
        """
        if any(word in ("-h", "--help") for word in argv):
            requested = HelpRequested(self._page)
            requested.options = (*self._options,)
            raise requested
        try:
            found, rest = self.parse_known_intermixed_args(argv)
        except ArgumentError as error:
            how = "takes no value" if "ignored explicit" in error.message else "requires a value"
            raise UsageError(f"{self._command}: {error.argument_name} {how}") from None
        unknown = [word for word in (*rest, *found.words) if word.startswith("-")]
        if unknown:
            option = unknown[0].partition("=")[0]
            *first, last = self._options or ["no options"]
            accepted = f"{', '.join(first)} or {last}" if first else last
            hint = did_you_mean(option, self._options) or f"expected {accepted}"
            raise UsageError(f"{self._command}: unknown option {quoted(option)}; {hint}")
        if len(found.words) > self._most_words:
            raise UsageError(
                f"{self._command}: got {quoted(' '.join(found.words))}; expected {self._expected}"
            )
        if self._names_run and found.words:
            found.run = found.words[0]
        return found


def _uid_of(user: str) -> int:
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise BadValueError() from None


USER = Kind("USER", "a user of this machine", _uid_of)
"""The number of a user given by name or number."""


def name_of(uid: int) -> str:
    """Return the user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


async def agents_of(given: Namespace) -> dict[AgentAddress, Answer]:
    """Return the selected agents of this machine that answer, with their descriptions."""
    # Imported here: the other commands answer with the standard library alone.
    from elastic_agent.agent.control.socket import agents_here, describe_all

    found = await describe_all([address for address in agents_here() if given.user in (None, address.uid)])
    return {address: answer for address, answer in found.items() if given.run in (None, answer.run_id)}


async def agents_of_one_run(command: str, given: Namespace) -> dict[AgentAddress, Answer]:
    """Return the same; raises ``UsageError`` if they are of several runs."""
    found = await agents_of(given)
    check_one_run(command, [answer.run_id for answer in found.values()], "--run")
    return found


HOW_TO_ASK = "run the command on a machine of the run, as the user who runs the agents, or as root"


async def no_agent(given: Namespace) -> str:
    """Return that no agent of this user, or of the run that is given, answers, and which runs have agents here."""
    whose = f"of run {escaped(given.run)} " if given.run else ""
    others = await agents_of(Namespace(run=None, user=given.user)) if given.run else {}
    runs = sorted({escaped(agent.run_id) for agent in others.values()})
    have = f"; there are agents of {', '.join(runs)}" if runs else ""
    return f"no running agent {whose}found on this machine for this user ({name_of(os.geteuid())}){have}"


def check_one_run(command: str, run_ids: Iterable[str], select: str) -> None:
    """Raise ``UsageError`` if there are several runs; ``select``: how to select one."""
    runs = sorted({escaped(run_id) for run_id in run_ids})
    if len(runs) > 1:
        raise UsageError(
            f"{command}: this machine has agents of several runs ({', '.join(runs)}); select one with {select}"
        )
