"""Making a forked process what `python -u SCRIPT ...` or `python -u -m MODULE ...` would have been.

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
import time
import types
from collections.abc import Callable
from importlib.machinery import BuiltinImporter, SourceFileLoader
from typing import Any

from elastic_agent.workers import _process_title

_STACKS_SIGNAL = "ELASTIC_AGENT_STACKS_SIGNAL"


class PythonProgram:
    """What is left to do: execute `code` in `namespace`, or, without code, call `run` with `arguments`."""

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

    @staticmethod
    def hide_frames(innermost: types.FrameType) -> None:
        """Have the exception that is about to end the program reported without the frames that ran it.

        These are `innermost` and those that called it.
        """
        depth, frame = 1, innermost
        while frame.f_back is not None:
            depth, frame = depth + 1, frame.f_back
        _hide_own_frames(depth)


def get_ready(renew_torch: bool) -> None:
    """What can be done before it is known which program it will be; once in every forked process."""
    _renew_randomness(renew_torch)
    forget_files()  # again later, when this process has its own copies of the pages it touches


def become(argv: list[str], env: dict[str, str]) -> PythonProgram:
    """Make this process what `argv` started in `env` would be; its descriptors 0 to 2 are right already.

    `argv` is `PYTHON -u SCRIPT ...` or `PYTHON -u -m MODULE ...`.
    """
    _take_environment(env)
    _process_title.show_as(argv, env)
    _renew_streams()
    forget_files()
    sys.orig_argv[:] = argv
    if _STACKS_SIGNAL in env:
        faulthandler.register(int(env[_STACKS_SIGNAL]), file=2, all_threads=True, chain=False)
    if argv[2] == "-m":
        sys.argv = ["-m", *argv[4:]]
        if not sys.flags.safe_path:
            sys.path.insert(0, os.getcwd())
        return _module_program(argv[3], alter_argv=True)
    return _script_program(argv[2], argv[3:])


def _hide_own_frames(outermost: int) -> None:
    """Have the exception that is about to end the program reported without the `outermost` frames that ran it."""
    report = sys.excepthook

    def without_our_frames(
        kind: type[BaseException], error: BaseException, trace: types.TracebackType | None
    ) -> None:
        depth = 0
        while trace is not None and (depth < outermost or trace.tb_frame.f_code.co_filename == __file__):
            trace = trace.tb_next
            depth += 1
        report(kind, error.with_traceback(trace), trace)

    sys.excepthook = without_our_frames


# --- the process ----------------------------------------------------------------------------------


def _take_environment(env: dict[str, str]) -> None:
    for name in set(os.environ) - set(env):
        del os.environ[name]
    for name, value in env.items():
        if os.environ.get(name) != value:
            os.environ[name] = value
    time.tzset()


def _renew_streams() -> None:
    """Standard output and error for what descriptors 1 and 2 are now, unbuffered (`-u`)."""
    # What becomes of undecodable characters is the same for input and output; the agent changed that of its own output.
    errors_by_name = (sys.stdin or sys.stdout).errors
    for name, fd, errors in (("stdout", 1, errors_by_name), ("stderr", 2, "backslashreplace")):
        # As create_stdio in Python/pylifecycle.c.
        raw = io.open(fd, "wb", buffering=0, closefd=False)  # noqa: SIM115, UP020 - stays open
        raw.name = f"<{name}>"
        encoding = getattr(sys, name).encoding
        stream = io.TextIOWrapper(raw, encoding, errors, newline="\n", write_through=True)
        stream.mode = "w"  # type: ignore[misc] # so does C
        setattr(sys, name, stream)
        setattr(sys, f"__{name}__", stream)


def _renew_randomness(renew_torch: bool) -> None:
    """What a fresh process would draw from the system. Python's `random` does so by itself after a fork."""
    if "multiprocessing.process" in sys.modules:
        multiprocessing = sys.modules["multiprocessing.process"]
        multiprocessing.current_process().authkey = os.urandom(32)
    if "numpy.random" in sys.modules:
        sys.modules["numpy.random"].seed()
    if renew_torch:
        sys.modules["torch"].seed()


def forget_files() -> None:
    """They may have changed since the spawner looked, and the directory too."""
    importlib.invalidate_caches()
    if "linecache" in sys.modules:
        sys.modules["linecache"].clearcache()
    if "multiprocessing.process" in sys.modules:
        sys.modules["multiprocessing.process"].ORIGINAL_DIR = os.getcwd()  # type: ignore[attr-defined]


# --- the program ----------------------------------------------------------------------------------


def _script_program(script: str, arguments: list[str]) -> PythonProgram:
    sys.argv = [script, *arguments]
    if _holds_modules(script):  # a folder or an archive, with a __main__.py in it
        sys.path.insert(0, script)
        return _module_program("__main__", alter_argv=False)
    if not sys.flags.safe_path:
        sys.path.insert(0, os.path.dirname(os.path.realpath(script)))
    path = os.path.abspath(script)
    try:
        with open(path, "rb") as file:
            source = file.read()
    except OSError as error:
        message = f"{sys.orig_argv[0]}: can't open file {path!r}: [Errno {error.errno}] {error.strerror}"
        return PythonProgram(run=_refuse, arguments=(message,))
    namespace = _new_main(path).__dict__
    try:
        return PythonProgram(compile(source, path, "exec", dont_inherit=True), namespace)
    except Exception as error:
        return PythonProgram(run=_raise, arguments=(error.with_traceback(None),))


def _module_program(module: str, *, alter_argv: bool) -> PythonProgram:
    """`alter_argv`: let argv[0] be the module's file."""
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
    """A module of its own in `sys.modules["__main__"]`, where unpickling and multiprocessing look."""
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


def _refuse(message: str) -> None:
    print(message, file=sys.stderr)
    sys.exit(2)  # as CPython's


def _raise(error: Exception) -> None:
    raise error
