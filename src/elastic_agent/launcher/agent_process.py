"""The agent as a child process: its command line, what it runs, and how it ended."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from elastic_agent import linux
from elastic_agent.config.errors import UsageError
from elastic_agent.config.load import load_settings
from elastic_agent.config.settings import spec_by_name
from elastic_agent.exit_codes import MEANINGS, ExitCode
from elastic_agent.launch_outcome import FILE, LaunchOutcome
from elastic_agent.worker_variables import LAUNCH_FOLDER


class LaunchError(RuntimeError):
    """The run ended without success, and not by a failure of workers of this node. ``exit_code``: the agent's."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def launch(entrypoint: Callable[..., Any] | str, *args: Any, **settings: Any) -> dict[int, Any]:
    """Run ``entrypoint(*args)`` in the workers of an elastic run, with the agent of this node.

    Args:
        entrypoint: a function, which is pickled (with cloudpickle if that is installed); or a program, for which
            ``args`` are its arguments.
        args: what every worker passes to it.
        settings: settings of the agent, by their names in the settings file; others come from the environment and
            from the file as usual.

    Returns:
        What the function returned, by global rank, for the workers of this node; None for each worker of a program.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: workers of this node failed, and the
            restart budget is exhausted.
        LaunchError: the run ended otherwise without success, or could not be started.
        TypeError: there is no such setting, or the function or an argument cannot be pickled.
    """
    options = _options(settings)
    environ = {**os.environ, **_switched_off(settings)}
    with tempfile.TemporaryDirectory(prefix="elastic-agent-launch-") as name:
        folder = Path(name)
        # The folder is not an argument: those should be the same on all nodes.
        environ[LAUNCH_FOLDER] = name
        if isinstance(entrypoint, str):
            script = ["--no-python", entrypoint, *map(str, args)]
        else:
            write_call(folder, entrypoint, args)
            script = ["--module", "elastic_agent.launcher.function", _full_name(entrypoint)]
        mistake = _find_mistake([*options, *script], environ)
        code = _run([*options, *script], environ)
        return _result(entrypoint, folder, code, mistake)


def _options(settings: Mapping[str, Any]) -> list[str]:
    known = spec_by_name()
    options = []
    for name, value in settings.items():
        spec = known.get(name)
        if spec is None:
            raise TypeError(f"got setting {name!r}; expected one of {', '.join(known)}")
        if spec.kind.is_switch:
            options += [spec.flag] if value else []
        elif value is not None:
            text = ",".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
            options.append(f"{spec.flag}={text}")
    return options


def _switched_off(settings: Mapping[str, Any]) -> dict[str, str]:
    """Return variables for switches that are False, which options cannot express: they outrank a settings file."""
    known = spec_by_name()
    off = (known[name] for name, value in settings.items() if known[name].kind.is_switch and value is False)
    return {spec.variables[0]: "0" for spec in off}


def _find_mistake(arguments: Sequence[str], environ: Mapping[str, str]) -> str:
    """Return what is wrong with the settings, or nothing; the agent only prints it."""
    try:
        load_settings(arguments, environ)
    except UsageError as error:
        return str(error)
    return ""


def pickler() -> tuple[Callable[[Any], bytes], bool]:
    """Return a function that pickles, and whether it pickles functions of the main module by value, as cloudpickle
    does."""
    try:
        return import_module("cloudpickle").dumps, True
    except ImportError:
        return pickle.dumps, False


def write_call(folder: Path, function: Callable[..., Any], args: Sequence[Any]) -> None:
    """Write what workers call into the folder. Raises TypeError when it cannot be pickled."""
    dumps, by_value = pickler()
    main = getattr(sys.modules["__main__"], "__file__", None)
    try:
        call = dumps((function, tuple(args)))
    except Exception as error:
        hint = "" if by_value else "; install cloudpickle, or define it in a module"
        raise TypeError(f"cannot pickle {_name(function)} and its arguments: {error}{hint}") from error
    if not by_value and function.__module__ == "__main__" and main is None:
        raise TypeError(
            f"cannot pickle {_name(function)}, which is defined interactively; install cloudpickle, or define it in "
            "a module"
        )
    by_file = main if not by_value and function.__module__ == "__main__" else None
    where = os.path.abspath(by_file) if by_file is not None else None
    (folder / "call").write_bytes(pickle.dumps((sys.path, where, call)))
    for kind in ("results", "errors"):
        (folder / kind).mkdir()


def _run(arguments: Sequence[str], environ: Mapping[str, str]) -> int:
    """Run the agent and return its exit code.

    An interrupt (Ctrl-C) makes the node leave the run, and is raised when it has left.
    """
    argv = [sys.executable, "-c", linux.ENDS_WITH_PARENT, str(os.getpid()), "-m", "elastic_agent", *arguments]
    # In a process group of its own: a terminal's Ctrl-C would reach it twice.
    agent = subprocess.Popen(argv, stdin=subprocess.DEVNULL, env=environ, process_group=0)
    try:
        return agent.wait()
    except KeyboardInterrupt:
        agent.send_signal(signal.SIGINT)
        agent.wait()
        raise
    finally:
        if agent.poll() is None:
            agent.kill()
            agent.wait()


def _result(entrypoint: Callable[..., Any] | str, folder: Path, code: int, mistake: str) -> dict[int, Any]:
    """Return what the launch returns, or raise its error, after the agent has exited with this code.

    ``mistake``: what is wrong with the settings, if anything is.
    """
    outcome = LaunchOutcome.read(folder)
    if code == ExitCode.FINISHED:
        if outcome is None:
            raise LaunchError(
                f"the run finished, but its agent did not write {folder / FILE}; expected a disk with free space",
                code,
            )
        if isinstance(entrypoint, str):
            return dict.fromkeys(outcome.ranks)
        if not outcome.started:
            raise LaunchError(f"there are no results: {outcome.reason}", code)
        results = (folder / "results" / str(outcome.generation)).glob("[0-9]*")
        by_rank = sorted((int(file.name), file) for file in results)
        return {rank: pickle.loads(file.read_bytes()) for rank, file in by_rank}
    reason = outcome.reason if outcome is not None else ""
    if code == ExitCode.FAILED and outcome is not None and outcome.failed:
        from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

        failures = {
            worker.rank: ProcessFailure(
                worker.local_rank, worker.pid, worker.returncode, _error_file(folder, worker.pid)
            )
            for worker in outcome.failed
        }
        error = ChildFailedError(_name(entrypoint), failures)
        error.add_note(f"elastic-agent: the run failed: {reason}")
        raise error
    meanings = {int(known): meaning for known, meaning in MEANINGS.items()}
    why = reason or mistake or meanings.get(code, "see its messages")
    raise LaunchError(f"elastic-agent exited with code {code}: {why}", code)


def _error_file(folder: Path, pid: int) -> str:
    try:
        return os.fsdecode((folder / "errors" / str(pid)).read_bytes())
    except OSError:
        return "<N/A>"  # as torch has it


def _full_name(function: Callable[..., Any]) -> str:
    """Return a name that tells functions of one run id apart, and is the same on every machine."""
    while isinstance(function, functools.partial):
        function = function.func
    named = function if hasattr(function, "__name__") else type(function)
    module = getattr(named, "__module__", None) or ""
    if module == "__main__":
        module = os.path.basename(getattr(sys.modules["__main__"], "__file__", None) or "")
    return f"{module}:{named.__name__}" if module else str(named.__name__)


def _name(entrypoint: Callable[..., Any] | str) -> str:
    return entrypoint if isinstance(entrypoint, str) else getattr(entrypoint, "__name__", repr(entrypoint))
