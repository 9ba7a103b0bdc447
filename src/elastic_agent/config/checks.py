"""What can be checked on this machine before anything is started: the script and the paths."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import find_spec
from pathlib import Path

from elastic_agent.config.directories import problem_with_file, problem_with_folder
from elastic_agent.config.draft import Draft
from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.config.kinds import NO_SIGNAL
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
    path = Path(script)
    if path.is_dir():
        if not (path / "__main__.py").is_file():
            raise UsageError(f"script {quoted(script)} is a folder without __main__.py; {expected}")
    elif not path.exists():
        where = "" if path.is_absolute() else f" in {os.getcwd()}"
        raise UsageError(f"script {quoted(script)} does not exist{where}; {expected}")
    if not os.access(path, os.R_OK):
        raise UsageError(f"script {quoted(script)} cannot be read by this user; {expected}")


def _check_program(program: str, search_path: str) -> None:
    if os.sep in program:
        places = [Path(program)]
        where = "is not an executable file"
    else:
        places = [Path(folder or ".", program) for folder in search_path.split(os.pathsep)]
        where = "is not found on PATH"
    if not any(place.is_file() and os.access(place, os.X_OK) for place in places):
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
