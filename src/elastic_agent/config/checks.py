"""What can be checked on this machine before anything is started: the script and the paths."""

from __future__ import annotations

import os
import signal
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec

from elastic_agent.config.directories import problem_with_file, problem_with_folder
from elastic_agent.config.draft import Draft
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.kinds import NO_SIGNAL
from elastic_agent.config.source import Layer, Source
from elastic_agent.values import largest_world


def check_paths(draft: Draft) -> None:
    """The files and folders that were named can be written; raises ``UsageError``."""
    for name in ("state_dir", "log_dir"):
        problem = problem_with_folder(draft.values[name]) if draft.is_given(name) else ""
        if problem:
            raise draft.wrong(name, problem, "a folder that can be written")
    if draft.is_given("event_journal"):
        problem = problem_with_file(draft.values["event_journal"])
        if problem:
            raise draft.wrong("event_journal", problem, "a file that can be written")


def leave_ignored_signals(draft: Draft) -> None:
    """Drop from the default set the signals that were ignored when this program was started.

    ``nohup`` ignores SIGHUP and a shell without job control SIGINT and SIGQUIT of its background jobs, so that these
    go on when a terminal closes or Ctrl-C is meant for others. A signal that is named is handled all the same.
    """
    wanted = draft.values["signals_to_handle"]
    ignored = [name for name in wanted if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN]
    if not ignored or draft.is_given("signals_to_handle"):
        return
    names = ", ".join(ignored)
    source = Source(Layer.DEFAULT, f"default, without {names}: ignored at the start")
    draft.put("signals_to_handle", tuple(name for name in wanted if name not in ignored), source)
    draft.note(
        f"ignoring {names}, as when this agent was started (nohup, or a script's background job); "
        f"--signals-to-handle {','.join(wanted)} has them handled"
    )


def check_notices(draft: Draft) -> None:
    """Each signal has one meaning, and some number of nodes is allowed; raises ``UsageError``."""
    taken = draft.values["notice_signal"] in draft.values["signals_to_handle"]
    if taken and not draft.is_given("notice_signal"):
        draft.put("notice_signal", NO_SIGNAL, draft.sources["signals_to_handle"])
    elif taken:
        raise draft.wrong(
            "notice_signal",
            "which makes this node leave already (--signals-to-handle)",
            "another signal, or none",
        )
    counts, nodes = draft.values["node_unit"], draft.values["nnodes"]
    if not largest_world(nodes.most, nodes.least, nodes.most, counts):
        raise draft.wrong(
            "node_unit",
            f"which allows no number of nodes from {nodes.least} to {nodes.most}",
            "one that fits --nnodes, or another --nnodes",
        )


def check_requeue(draft: Draft) -> None:
    """A command that will never be run deserves a word."""
    if draft.values["requeue"] == "never" and draft.is_given("requeue_command"):
        draft.warn(
            f"{draft.sources['requeue_command']} has no effect here: {draft.sources['requeue']} says never"
        )


def check_script(draft: Draft, script: str, environ: Mapping[str, str]) -> None:
    """The script can be started as the settings say; raises ``UsageError``."""
    values = draft.values
    if values["module"] and values["no_python"] and not values["run_path"]:
        raise UsageError(f"{draft.sources['module']} and {draft.sources['no_python']} exclude each other")
    if values["run_path"]:
        _check_python_script(script)
    elif values["no_python"]:
        _check_program(script, environ.get("PATH", os.defpath))
    elif not values["module"]:
        _check_python_script(script)


def _check_python_script(script: str) -> None:
    expected = "expected a Python file (-m starts a module, --no-python a program)"
    try:
        is_folder = stat.S_ISDIR(os.stat(script).st_mode)
    except FileNotFoundError:
        where = "" if os.path.isabs(script) else f" in {_shown_directory()}"
        raise UsageError(f"script {quoted(script)} does not exist{where}; {expected}") from None
    except (OSError, ValueError) as error:
        # A folder on the way cannot be searched, a part of the name is too long, there is a NUL in it.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"script {quoted(script)} cannot be found: {reason}; {expected}") from None
    if is_folder and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {quoted(script)} is a folder without __main__.py; {expected}")
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {quoted(script)} cannot be read by this user; {expected}")


def _shown_directory() -> str:
    """The working directory for a message; it may have been removed."""
    try:
        return os.getcwd()
    except OSError:
        return "the working directory, which was removed"


def _check_program(program: str, search_path: str) -> None:
    if os.sep in program:
        places = [program]
        where = "is not an executable file"
    else:
        places = [os.path.join(folder or ".", program) for folder in search_path.split(os.pathsep)]
        where = "is not found on PATH"
    if not any(os.path.isfile(place) and os.access(place, os.X_OK) for place in places):
        raise UsageError(f"program {quoted(program)} {where}; expected a program, as --no-python is given")


def check_module(name: str) -> None:
    """The outermost package of a module to start can be found; raises ``UsageError``.

    What is inside the package only its import would tell.
    """
    outermost = name.partition(".")[0]
    if PathFinder.find_spec(outermost, [os.getcwd()]) is not None or find_spec(outermost) is not None:
        return
    raise UsageError(
        f"module {quoted(name)} is not found from {os.getcwd()}; expected a module that "
        f"{sys.executable} -m can start (is its package installed in this environment?)"
    )
