"""Finds the command, runs it, and turns errors into one line and an exit code."""

from __future__ import annotations

import contextlib
import errno
import importlib
import io
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from typing import TextIO

from elastic_agent.config.errors import (
    HelpRequested,
    MissingScriptError,
    ShortHelpRequested,
    UsageError,
    VersionRequested,
    nearest,
)
from elastic_agent.exit_codes import ExitCode
from elastic_agent.linux import open_missing_standard_streams

_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)
"""The errors with which writing to a full or broken disk ends."""

LAST_LINES_S = 2.0
"""The time that closing the log handlers may take at the end."""

Command = Callable[..., int]
"""Called with the words after its name."""

COMMANDS = {
    "run": ("run", "", ""),
    "serve": ("serve", "[OPTIONS]", "host the rendezvous store on a machine that does not train"),
    "doctor": ("doctor", "[OPTIONS] [SCRIPT]", "examine the machines of a run before it starts"),
    "chaos": ("chaos", "[OPTIONS] -- SCRIPT", "test a script with faults on a simulated cluster"),
    "init": (
        "settings",
        "[OPTIONS] [SCRIPT]",
        "write a settings file to start from, with a comment for each setting",
    ),
    "settings": ("settings", "[OPTIONS]", "print the effective settings and the source of each"),
    "status": ("status", "[RUN]", "show the status of a run: nodes, workers, restarts, history"),
    "why": ("status", "[RUN]", "print why the generations of a run failed"),
    "drain": ("control", "[NODE]", "gracefully remove a node from its run"),
    "stop": ("control", "", "gracefully shut down a run on all nodes"),
    "logs": ("workers", "[NODE[/SLOT]]", "print what the workers have written, on all machines"),
    "stacks": ("workers", "[RUN]", "print the Python stacks of the workers"),
    "secret": (
        "secret",
        "[FILE]",
        "create a secret by which the agents of a run know each other, or certificates from it",
    ),
    "completion": ("completion", "SHELL", "print a completion script for bash, zsh or fish"),
    "version": ("help", "", "print the versions of elastic-agent, Python and torch"),
}
"""By command, the module beside this one that has a function of the command's name (only the one that is needed is
imported: users wait for it), and its arguments and summary, as the help page lists them in this order."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit code (``elastic_agent.exit_codes``).

    ``run`` is the command when the first word is none of ``COMMANDS``. A script with a command's name is
    started with ``run`` before it, or with a slash in it.

    Args:
        argv: the words after the program's name; None means this process's own.
    """
    _open_closed_streams()
    try:
        return _answer(list(sys.argv[1:] if argv is None else argv))
    except KeyboardInterrupt:
        return ExitCode.INTERRUPTED
    except BrokenPipeError:  # the reader has gone, as in `elastic-agent settings | head -1`
        _give_up(sys.stdout)
        return ExitCode.FINISHED
    except Exception as error:
        if isinstance(error, OSError) and error.errno in _FULL:
            _give_up(sys.stdout)
            _print_error(f"cannot write the output: {error.strerror}")
            return ExitCode.USAGE
        _print_error(
            f"internal error; please report it with the following lines\n{traceback.format_exc()}".rstrip()
        )
        return ExitCode.INTERNAL


def _open_closed_streams() -> None:
    """Have /dev/null where standard input, output or error is closed (``2>&-``), as daemons may start programs.

    Before anything is opened: the next file or socket would get the free number, and what is written to standard error,
    by libraries and by workers too, would go there.
    """
    if None not in (sys.stdin, sys.stdout, sys.stderr):  # Python sets those to None
        return
    open_missing_standard_streams()
    sys.stdin = sys.stdin or open(0, closefd=False)  # noqa: SIM115
    sys.stdout = sys.stdout or open(1, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115
    sys.stderr = sys.stderr or open(2, "w", errors="backslashreplace", closefd=False)  # noqa: SIM115


def _print_error(text: str) -> None:
    """Print a line on standard error, if that can be written."""
    try:
        print(f"elastic-agent: {text}", file=sys.stderr, flush=True)
    except OSError:
        _give_up(sys.stderr)


def _give_up(stream: TextIO) -> None:
    """Discard what could not be written: Python would try again when it exits, and end with exit code 120."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _answer(argv: list[str]) -> int:
    meant = _mistyped_command(argv)
    name = argv.pop(0) if argv and argv[0] in COMMANDS else "run"
    command = load_command(name)
    try:
        return command(argv)
    except UsageError as error:
        if isinstance(error, MissingScriptError) and not argv:
            _print_short_help()
        _print_error(f"{error}{meant}")
        return ExitCode.USAGE
    except HelpRequested as requested:
        is_short = isinstance(requested, ShortHelpRequested)
        print("".join(requested.args) or _general_help(is_short=is_short), flush=True)
        return ExitCode.FINISHED
    except VersionRequested:
        return load_command("version")(())


def load_command(name: str) -> Command:
    """Return the function of a command of ``COMMANDS``."""
    module, *_ = COMMANDS[name]
    command: Command = getattr(importlib.import_module(f"elastic_agent.cli.{module}"), name)
    return command


def _general_help(*, is_short: bool) -> str:
    from elastic_agent.cli.help import help_page, short_page

    return short_page() if is_short else help_page()


def _print_short_help() -> None:
    """Print the short help on standard error: it is the answer to a mistake."""
    from elastic_agent.cli.help import help_head

    with contextlib.suppress(OSError):
        print(
            f"{help_head()}\nOptions that are used most: elastic-agent -h; all: elastic-agent --help",
            file=sys.stderr,
        )


def _mistyped_command(argv: list[str]) -> str:
    """Return a hint, if the first word is no script, but nearly the name of a command."""
    if not argv or argv[0] in COMMANDS or not argv[0].isalpha() or os.path.exists(argv[0]):
        return ""
    found = nearest(argv[0], COMMANDS, likeness=0.7)
    return f"; or did you mean the command elastic-agent {found}?" if found else ""


def console_main() -> None:
    """Run the installed command and end the process with its exit code."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as standard error is: nothing is unprintable
    code = main()
    if "elastic_agent.logs" in sys.modules:
        # Threads may still be inside a store's client, torch's, too; an ordinary exit would wait for them, or tear it
        # down under them and abort.
        import logging
        import threading

        # It waits for handlers; one that a site registered for torchrun's events may be stuck.
        closing = threading.Thread(target=logging.shutdown, name="close-logs", daemon=True)
        closing.start()
        closing.join(LAST_LINES_S)
        for stream in (sys.stdout, sys.stderr):
            with contextlib.suppress(OSError, ValueError, AttributeError):  # it has no reader, or is closed
                stream.flush()
        os._exit(code)
    sys.exit(code)
