"""``elastic-agent version``: the versions a bug report needs."""

from __future__ import annotations

import platform
from collections.abc import Sequence

from elastic_agent import installed_version
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.parser import HelpRequested
from elastic_agent.exit_codes import ExitCode

PAGE = """\
Usage: elastic-agent version

Prints the versions of elastic-agent, Python and torch. Include them in bug reports."""


def version(argv: Sequence[str]) -> int:
    """Print the versions of this package, Python and torch. Takes no words."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpRequested(PAGE)
    if argv:
        raise UsageError(f"version: got {quoted(argv[0])}; expected no arguments")
    print(
        f"elastic-agent {installed_version()} (Python {platform.python_version()}, torch {_torch_version()})",
        flush=True,
    )
    return ExitCode.FINISHED


def _torch_version() -> str:
    """torch's version from its package data; importing torch would take a second."""
    from importlib import metadata

    try:
        return metadata.version("torch")
    except metadata.PackageNotFoundError:
        return "not installed"
