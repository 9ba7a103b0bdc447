"""Makes a forked process what `python -u SCRIPT ...` or `python -u -m MODULE ...` would have been.

Follows what CPython does between its start and the script's first line (Modules/main.c, Python/pylifecycle.c,
Python/pythonrun.c): `runpy` is used only where CPython itself uses it, because a script run by it has another
`__file__`, no loader, and loses its `__main__` before the interpreter ends.
"""

from __future__ import annotations

import builtins
import faulthandler
import importlib
import io
import os
import sys
import threading
import time
import types
from collections.abc import Callable, Mapping
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any, NoReturn

from elastic_agent.exit_note import Writer, exit_code, note_immediate_exits
from elastic_agent.integrations import post_import
from elastic_agent.worker_variables import STACKS_SIGNAL
from elastic_agent.workers.guard.cold import with_startup_hook
from elastic_agent.workers.spawner import process_title
from elastic_agent.workers.spawner.curated import current_folder
from elastic_agent.workers.spawner.preloaded import Preloaded


class PythonProgram:
    """The remaining step: execute `code` in `namespace`, or, without code, call `run` with `arguments`.

    To be done in the outermost frame there is, so that the interpreter ends as it would have ended without us.
    """

    def __init__(
        self,
        code: types.CodeType | None = None,
        namespace: dict[str, Any] | None = None,
        run: Callable[..., object] = len,
        arguments: tuple[object, ...] = (),
    ) -> None:
        self.code = code
        self.namespace = namespace
        self.run = run
        self.arguments = arguments
        self.exit_note: Writer | None = None

    def finish(self, failure: BaseException | None) -> None:
        """Call when it has ended, however it has: with the exception that ended it, unless that is being handled.

        Lets go of the script's namespace, which the interpreter is to destroy: this object may live longer, because
        exceptions that preloaded modules keep refer to all frames above them.
        """
        self.code = self.namespace = None
        if self.exit_note is not None:
            error = failure if failure is not None else sys.exc_info()[1]
            self.exit_note.write(error, exit_code(error))

    @staticmethod
    def report(error: BaseException) -> None:
        """Report the exception that ended the program as the interpreter would, but without the frame that ran it.

        The exception is to be raised again: the interpreter, which then reports nothing, takes the exit code from it.
        """
        own = error.__traceback__
        without_ours = error.with_traceback(own.tb_next if own is not None else None)
        sys.excepthook(type(error), without_ours, without_ours.__traceback__)
        hook = sys.excepthook
        sys.excepthook = lambda *_: setattr(sys, "excepthook", hook)


def get_ready(preloaded: Preloaded) -> None:
    """Do what can be done before it is known which program it will be; once in every forked process."""
    preloaded.renew()
    if hasattr(threading.Thread, "_set_native_id"):
        threading.main_thread()._set_native_id()  # type: ignore[attr-defined] # Python before 3.13 forgets to
    forget_files()  # again later, when this process has its own copies of the pages it touches


def become(launch: Mapping[str, Any], preloaded: Preloaded, started: Callable[[], object]) -> PythonProgram:
    """Make this process the worker of `launch` (`guard.client.Launch`); its descriptors 0 to 2 are right already.

    `started` is called when nothing of ours can go wrong any more.
    """
    argv, env = launch["argv"], launch["env"]
    _take_environment(env)
    process_title.show_as(argv, env)
    _renew_streams()
    forget_files()
    sys.orig_argv[:] = argv
    faulthandler.enable(file=2)  # says in which line of the script native code crashed
    if STACKS_SIGNAL in env:
        faulthandler.register(int(env[STACKS_SIGNAL]), file=2, all_threads=True, chain=False)
    folder = current_folder()
    post_import.watch()
    started()
    exit_note = Writer.of_worker(env)
    if exit_note is not None:
        note_immediate_exits(exit_note)
        preloaded.on_no_effect = exit_note.want_cold
    if reason := preloaded.begin():
        line = f"elastic-agent: this worker starts cold: {reason} after torch was preloaded\n"
        print(line, end="", file=sys.stderr)
        _execute(launch, folder)
    try:
        program = _program(argv)
        program.exit_note = exit_note
        preloaded.watch()
        return program
    except Exception:
        _execute(launch, folder)  # it cannot run: CPython itself reports why


def _execute(launch: Mapping[str, Any], folder: str | None) -> NoReturn:
    """Become a cold worker after all."""
    if folder is not None:
        os.chdir(folder)
    os.execvpe(launch["argv"][0], launch["argv"], with_startup_hook(launch["env"]))


# --- the process ----------------------------------------------------------------------------------


def _take_environment(env: dict[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()


def _renew_streams() -> None:
    """Make standard output and error for what descriptors 1 and 2 are now, and all three unbuffered (`-u`)."""
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(line_buffering=False, write_through=True)
    # What becomes of undecodable characters is the same for input and output; the agent changed that of its own output.
    errors_by_name = getattr(sys.stdin or sys.stdout, "errors", "strict")
    for name, fd, errors in (("stdout", 1, errors_by_name), ("stderr", 2, "backslashreplace")):
        # As create_stdio in Python/pylifecycle.c.
        raw = io.open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115, UP020 - stays open
        raw.name = f"<{name}>"
        encoding = getattr(getattr(sys, name), "encoding", "utf-8")
        stream = io.TextIOWrapper(raw, encoding, errors, newline="\n", write_through=True)
        stream.mode = "w"  # type: ignore[misc] # so does C
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def forget_files() -> None:
    """Forget files: they may have changed since the spawner looked, and the directory too."""
    importlib.invalidate_caches()


# --- the program ----------------------------------------------------------------------------------


def _program(argv: list[str]) -> PythonProgram:
    if argv[2] != "-m":
        return _script_program(argv)
    sys.argv = ["-m", *argv[4:]]
    if not sys.flags.safe_path:
        sys.path.insert(0, os.getcwd())
    return _module_program(argv[3], alter_argv=True)


def _script_program(argv: list[str]) -> PythonProgram:
    script = argv[2]
    sys.argv = argv[2:]
    # Not normalised: as CPython.
    path = script if os.path.isabs(script) else os.path.join(os.getcwd(), script)
    if _holds_modules(path):  # a folder or an archive, with a __main__.py in it
        sys.path.insert(0, path)
        return _module_program("__main__", alter_argv=False)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    with open(path, "rb") as file:
        source = file.read()
    code = compile(source, path, "exec", dont_inherit=True)
    return PythonProgram(code, _new_main(path).__dict__)


def _module_program(module: str, *, alter_argv: bool) -> PythonProgram:
    """Return the program that runs a module. `alter_argv`: let argv[0] be the module's file."""
    import runpy

    _new_main(None)
    # What CPython itself calls for -m; its frames are in the tracebacks of such programs.
    return PythonProgram(run=runpy._run_module_as_main, arguments=(module, alter_argv))  # type: ignore[attr-defined]


def _holds_modules(path: str) -> bool:
    for hook in sys.path_hooks:
        try:
            hook(path)
        except ImportError:
            continue
        return True
    return False


def _new_main(path: str | None) -> types.ModuleType:
    """Put a module of its own into `sys.modules["__main__"]`, where unpickling and multiprocessing look."""
    main = types.ModuleType("__main__")
    main.__annotations__ = {}
    main.__builtins__ = builtins  # type: ignore[attr-defined]
    main.__loader__ = BuiltinImporter
    if path is not None:
        main.__loader__ = SourceFileLoader("__main__", path)
        main.__file__ = path
        main.__cached__ = None  # type: ignore[attr-defined]
    sys.modules["__main__"] = main
    return main
