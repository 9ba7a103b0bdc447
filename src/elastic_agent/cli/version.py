"""``elastic-agent version``: the versions a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from elastic_agent import installed_version
from elastic_agent.cli.arguments import CommandParser
from elastic_agent.exit_codes import ExitCode

PAGE = """\
Usage: elastic-agent version

Prints the versions of elastic-agent, Python and torch. Include them in bug reports."""


def version(argv: Sequence[str]) -> int:
    """Print the versions of this package, Python and torch."""
    CommandParser("version", PAGE, expected="no arguments").read(argv)
    print(
        f"elastic-agent {installed_version()} (Python {platform.python_version()}, torch {_torch_version()})",
        flush=True,
    )
    return ExitCode.FINISHED


def _torch_version() -> str:
    """Return torch's version from its package data; importing torch would take a second."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
