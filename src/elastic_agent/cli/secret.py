"""``elastic-agent secret [FILE]``: a new secret for the agents of a run."""

from __future__ import annotations

import os
from collections.abc import Sequence

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.parser import HelpRequested
from elastic_agent.config.run_secret import new_secret
from elastic_agent.exit_codes import ExitCode

PAGE = """\
Usage: elastic-agent secret [FILE]

Writes a new secret to FILE, which must not exist yet and which only this user can read; without FILE, prints it.
Copy the file to all machines, and start every agent with --secret-file FILE: the agents then accept only records of
each other, so that others who reach the port of the store cannot join, redirect or end the run."""


def secret(argv: Sequence[str]) -> int:
    """Create a secret."""
    if any(word in ("-h", "--help") for word in argv):
        raise HelpRequested(PAGE)
    if len(argv) > 1 or (argv and argv[0].startswith("-")):
        raise UsageError(f"secret: got {quoted(argv[-1])}; expected at most one file name")
    if not argv:
        print(new_secret(), flush=True)
        return ExitCode.FINISHED
    try:
        fd = os.open(argv[0], os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    except FileExistsError:
        raise UsageError(f"secret: {quoted(argv[0])} exists already; expected a new file") from None
    except OSError as error:
        raise UsageError(f"secret: cannot create {quoted(argv[0])}: {error.strerror}") from None
    with open(fd, "w") as file:
        file.write(f"{new_secret()}\n")
    return ExitCode.FINISHED
