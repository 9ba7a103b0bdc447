"""argparse for commands that answer with one line or a page of their own, and users as they name them; no settings."""

from __future__ import annotations

import argparse
import pwd
from typing import NoReturn

from elastic_agent.config.errors import UsageError, quoted


class HelpRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--help`` or ``-h``; the argument is the command's page, if it has its own."""


class VersionRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--version``."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)


def name_of(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(command: str, user: str) -> int:
    """The number of a user given by name or number.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise UsageError(f"{command}: --user: got {quoted(user)}; expected a user of this machine") from None
