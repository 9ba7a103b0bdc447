"""argparse for commands that answer with one line or a page of their own; knows no settings."""

from __future__ import annotations

import argparse
from typing import NoReturn

from elastic_agent.config.errors import UsageError


class HelpRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--help`` or ``-h``; the argument is the command's page, if it has its own."""


class VersionRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--version``."""


class Parser(argparse.ArgumentParser):
    """A parser that raises instead of leaving the process."""

    def error(self, message: str) -> NoReturn:
        raise UsageError(message)
