"""Checks of the script: what can be known of it on this machine before anything is started."""

from __future__ import annotations

import os
import re
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import PathFinder
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path

from elastic_agent.config.builder import SettingsBuilder
from elastic_agent.config.errors import UsageError, did_you_mean, quoted
from elastic_agent.python_source import problem_with_source

_INTERPRETER = re.compile(r"python[\d.]*")


def check_script(builder: SettingsBuilder, script: str, environ: Mapping[str, str]) -> None:
    """Check that the script can be started with these settings; raises ``UsageError``."""
    check_working_directory()
    values = builder.values
    if values["module"] and values["no_python"] and not values["run_path"]:
        raise UsageError(
            f"{builder.sources['module']} and {builder.sources['no_python']} are mutually exclusive",
            "expected one of them",
        )
    search_path = environ.get("PATH", os.defpath)
    if values["no_python"] and not values["run_path"]:
        if problem := _problem_with_program(script, search_path):
            raise UsageError(
                f"program {quoted(script)} {problem}", "expected an executable program because of --no-python"
            )
        return
    if values["run_path"] or not values["module"]:
        joins_others = values["rdzv_endpoint"] is not None and values["nnodes"].most > 1
        _check_python_script(script, environ.get("SLURM_JOB_ID", ""), joins_others=joins_others)
    if builder.is_given("python_exec") and (
        problem := _problem_with_program(values["python_exec"], search_path)
    ):
        raise builder.wrong("python_exec", f"which {problem}")


def _check_python_script(script: str, slurm_job: str, *, joins_others: bool) -> None:
    expected = "expected a Python file (use -m to run a module, --no-python to run a program)"
    if _INTERPRETER.fullmatch(os.path.basename(script)) and (
        os.path.isabs(script) or not os.path.exists(script)
    ):
        raise UsageError(
            f"script {quoted(script)} is an interpreter, not a script",
            "leave it out: elastic-agent [OPTIONS] train.py; for another interpreter, pass --python-exec",
        )
    try:
        mode = os.stat(script).st_mode
    except FileNotFoundError:
        if slurm_job and re.search(rf"/job0*{re.escape(slurm_job)}/", os.path.abspath(script)):
            expected = (
                "Slurm runs a copy of the job script from there, so its folder is not that of the job script; name "
                "the script with $SLURM_SUBMIT_DIR or an absolute path"
            )
        elif joins_others:
            expected = (
                "copy it to this machine, at the same path on all (or use -m to run a module, --no-python to run a "
                "program)"
            )
        where = "" if os.path.isabs(script) else f" in {os.getcwd()}"
        raise UsageError(
            f"script {quoted(script)} does not exist{where}{_similar(script)}", expected
        ) from None
    except (OSError, ValueError) as error:
        # A folder on the way cannot be searched, a part of the name is too long, there is a NUL in it.
        reason = (error.strerror if isinstance(error, OSError) else None) or str(error)
        raise UsageError(f"script {quoted(script)} cannot be found: {reason}", expected) from None
    if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
        raise UsageError(
            f"script {quoted(script)} is a pipe, which can be read only once, but every worker and every "
            "restart reads the script",
            expected,
        )
    if stat.S_ISDIR(mode) and not os.path.isfile(os.path.join(script, "__main__.py")):
        raise UsageError(f"script {quoted(script)} is a directory without __main__.py", expected)
    if not os.access(script, os.R_OK):
        raise UsageError(f"script {quoted(script)} is not readable by this user", expected)


def check_source(script: str) -> None:
    """Check that a Python file compiles, as for the workers; raises ``UsageError``. Executes and writes nothing."""
    try:
        source = Path(script).read_bytes() if script.endswith(".py") else b""
    except OSError:  # a folder, or a file of which the workers report what is wrong
        return
    problem = problem_with_source(source)
    # Python runs what is compiled, and an archive.
    if problem and not source.startswith(MAGIC_NUMBER[:2]) and b"PK\x05\x06" not in source:
        raise UsageError(f"script {quoted(script)} does not compile: {problem}; nothing was started")


def _similar(script: str) -> str:
    """Return the Python file in the folder that was probably meant, in brackets; empty: none has a similar name."""
    folder, name = os.path.split(script)
    try:
        names = [file for file in os.listdir(folder or ".") if file.endswith(".py")]
    except (OSError, ValueError):
        return ""
    found = did_you_mean(name, names)
    return f" ({found})" if found else ""


def _problem_with_program(program: str, search_path: str) -> str:
    """Return why it cannot be started, to follow its name; empty when it can."""
    if os.sep in program:
        places, problem = [program], "is not an executable file"
    else:
        places = [os.path.join(folder or ".", program) for folder in search_path.split(os.pathsep)]
        problem = "was not found on the PATH"
    found = any(os.path.isfile(place) and os.access(place, os.X_OK) for place in places)
    return "" if found else problem


def check_working_directory() -> None:
    """Check that it was not removed since this shell entered it; raises ``UsageError``."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory is not accessible: {error.strerror} (was it removed?)",
            "expected an existing one, which torch needs: cd to another directory and start again",
        ) from None


def check_module(name: str) -> None:
    """Check that the outermost package of a module can be found; the rest, its import tells in the worker.

    Raises:
        UsageError: it cannot be found, or the name is that of a file.
    """
    dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
    if os.sep in name:
        raise UsageError(
            f"module {quoted(name)} is a path",
            f"expected the name of a module, with dots: -m {dotted}, or the script without -m",
        )
    outermost = name.partition(".")[0]
    try:
        spec = PathFinder.find_spec(outermost, [os.getcwd(), *sys.path]) or find_spec(outermost)
    except (ImportError, ValueError):  # no name of a module at all, or one without a specification
        spec = None
    if spec is None or (name.endswith(".py") and os.path.isfile(name)):
        hint = f" (specify the module without .py: -m {dotted})" if name.endswith(".py") else ""
        raise UsageError(
            f"module {quoted(name)} was not found from {os.getcwd()}{hint}",
            f"expected a module that {sys.executable} -m can run (is its package installed in this environment?)",
        )
