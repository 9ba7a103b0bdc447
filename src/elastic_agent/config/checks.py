"""What can be checked on this machine before anything is started: the script and the paths."""

from __future__ import annotations

import os
import re
import signal
import stat
import sys
from collections.abc import Mapping
from importlib.machinery import ModuleSpec, PathFinder
from importlib.util import MAGIC_NUMBER, find_spec
from pathlib import Path

from elastic_agent.config.builder import SettingsBuilder
from elastic_agent.config.directories import problem_with_file, problem_with_folder
from elastic_agent.config.errors import UsageError, did_you_mean, quoted
from elastic_agent.config.sources.base import Layer, Source
from elastic_agent.config.value_types import NO_SIGNAL
from elastic_agent.python_source import problem_with_source
from elastic_agent.values import largest_world


def check_paths(builder: SettingsBuilder) -> None:
    """The files and folders that were named can be written; raises ``UsageError``."""
    for name in ("state_dir", "log_dir"):
        problem = problem_with_folder(builder.values[name]) if builder.is_given(name) else ""
        if problem:
            raise builder.wrong(name, problem, "a writable directory")
    if builder.is_given("event_journal"):
        problem = problem_with_file(builder.values["event_journal"])
        if problem:
            raise builder.wrong("event_journal", problem, "a writable file")


def leave_ignored_signals(builder: SettingsBuilder) -> None:
    """Drop from the default set the signals that were ignored when this program was started.

    ``nohup`` ignores SIGHUP and a shell without job control SIGINT and SIGQUIT of its background jobs, so that these
    go on when a terminal closes or Ctrl-C is meant for others. A signal that is named is handled all the same.
    """
    wanted = builder.values["signals_to_handle"]
    ignored = [name for name in wanted if signal.getsignal(signal.Signals[name]) == signal.SIG_IGN]
    if not ignored or builder.is_given("signals_to_handle"):
        return
    names = ", ".join(ignored)
    source = Source(Layer.DEFAULT, f"default, without {names}: ignored when the agent was started")
    builder.put("signals_to_handle", tuple(name for name in wanted if name not in ignored), source)
    builder.note(
        f"ignoring {names}, which were ignored when this agent was started (nohup, or a script's "
        f"background job); set --signals-to-handle {','.join(wanted)} to handle them"
    )


def check_notices(builder: SettingsBuilder) -> None:
    """Each signal has one meaning; raises ``UsageError``."""
    taken = builder.values["notice_signal"] in builder.values["signals_to_handle"]
    if taken and not builder.is_given("notice_signal"):
        builder.put("notice_signal", NO_SIGNAL, builder.sources["signals_to_handle"])
    elif taken:
        raise builder.wrong(
            "notice_signal",
            "which already makes this node leave (--signals-to-handle)",
            "another signal, or none",
        )


def check_node_counts(builder: SettingsBuilder) -> None:
    """Some number of nodes is allowed, and the desired one is; raises ``UsageError``."""
    counts, nodes = builder.values["node_unit"], builder.values["nnodes"]
    desired = builder.values["desired_nodes"]
    if desired is not None and not nodes.least <= desired <= nodes.most:
        raise builder.wrong(
            "desired_nodes",
            f"which is not within --nnodes {nodes}",
            f"a number from {nodes.least} to {nodes.most}, or another --nnodes",
        )
    if not largest_world(nodes.most, nodes.least, nodes.most, counts):
        raise builder.wrong(
            "node_unit",
            f"which allows no number of nodes from {nodes.least} to {nodes.most}",
            "a value that fits --nnodes, or another --nnodes",
        )


def check_requeue(builder: SettingsBuilder) -> None:
    """Warn about a command that will never be run."""
    if builder.values["requeue"] == "never" and builder.is_given("requeue_command"):
        builder.warn(
            f"{builder.sources['requeue_command']} has no effect: {builder.sources['requeue']} is never"
        )


def check_script(builder: SettingsBuilder, script: str, environ: Mapping[str, str]) -> None:
    """The script can be started with these settings; raises ``UsageError``."""
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
    """A Python file compiles, as the workers would compile it; raises ``UsageError``. Executes and writes nothing."""
    try:
        source = Path(script).read_bytes() if script.endswith(".py") else b""
    except OSError:  # a folder, or a file of which the workers report what is wrong
        return
    problem = problem_with_source(source)
    is_compiled = source.startswith(MAGIC_NUMBER[:2])
    if (
        problem and not is_compiled and b"PK\x05\x06" not in source
    ):  # compiled, and an archive: Python runs both
        raise UsageError(f"script {quoted(script)} does not compile: {problem}; nothing was started")


def _similar(script: str) -> str:
    """Which Python file of the same folder was probably meant, in brackets; empty: none has a similar name."""
    folder, name = os.path.split(script)
    try:
        names = [one for one in os.listdir(folder or ".") if one.endswith(".py")]
    except (OSError, ValueError):
        return ""
    found = did_you_mean(name, names)
    return f" ({found})" if found else ""


def _problem_with_program(program: str, search_path: str) -> str:
    """Why it cannot be started, to follow its name; empty when it can."""
    if os.sep in program:
        places, problem = [program], "is not an executable file"
    else:
        places = [os.path.join(folder or ".", program) for folder in search_path.split(os.pathsep)]
        problem = "was not found on the PATH"
    found = any(os.path.isfile(place) and os.access(place, os.X_OK) for place in places)
    return "" if found else problem


def check_working_directory() -> None:
    """There is one: it was not removed since this shell entered it; raises ``UsageError``."""
    try:
        os.getcwd()
    except OSError as error:
        raise UsageError(
            f"the working directory is not accessible: {error.strerror} (was it removed?)",
            "expected an existing one, which torch needs: cd to another directory and start again",
        ) from None


def check_module(name: str) -> None:
    """A module to start can be found, as far as that can be determined without importing its packages.

    Raises:
        UsageError: it certainly cannot.
    """
    if os.sep in name:
        dotted = name.removesuffix(".py").strip("./").replace(os.sep, ".")
        raise UsageError(
            f"module {quoted(name)} is a path",
            f"expected the name of a module, with dots: -m {dotted}, or the script without -m",
        )
    parts = name.split(".")
    spec = _outermost(parts[0])
    for position, part in enumerate(parts[1:], start=1):
        if spec is None or _finds_its_modules_itself(spec):
            break
        found = ".".join(parts[:position])
        if spec.submodule_search_locations is None:
            hint = f" (specify the module without .py: -m {found})" if parts[position:] == ["py"] else ""
            raise _not_found(name, f"was not found: {found} is a module, not a package{hint}")
        spec = _inner(part, spec)
    if spec is None:
        raise _not_found(name, f"was not found from {os.getcwd()}")
    if spec.submodule_search_locations is None or _finds_its_modules_itself(spec):
        return
    if _inner("__main__", spec) is None:
        raise _not_found(name, "is a package without __main__")


def _not_found(name: str, wrong: str) -> UsageError:
    return UsageError(
        f"module {quoted(name)} {wrong}",
        f"expected a module that {sys.executable} -m can run (is its package installed in this environment?)",
    )


def _outermost(name: str) -> ModuleSpec | None:
    """Where ``python -m`` would find a package or module that is in no package."""
    try:
        return PathFinder.find_spec(name, [os.getcwd(), *sys.path]) or find_spec(name)
    except (ImportError, ValueError):  # no name of a module at all, or one without a specification
        return None


def _inner(name: str, package: ModuleSpec) -> ModuleSpec | None:
    # By its last name only: of one with dots, the parent would have to be imported.
    return PathFinder.find_spec(name, list(package.submodule_search_locations or ()))


def _finds_its_modules_itself(package: ModuleSpec) -> bool:
    """Whether importing the package may change where its modules are found."""
    if package.origin is None:  # a namespace: just folders
        return False
    try:
        code = Path(package.origin).read_bytes()
    except OSError:  # built in, or in an archive
        return True
    ways = (b"__path__", b"sys.modules", b"meta_path", b"path_hooks")
    return not package.origin.endswith(".py") or any(way in code for way in ways)
