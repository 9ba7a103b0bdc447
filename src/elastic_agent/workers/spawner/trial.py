"""Finds out which modules may be preloaded, by recording what they do while they are imported.

A module may be preloaded if a worker that is forked afterwards is what it would have been with an import of its own.
What could make a difference is attributed to the module itself rather than to those that import it: reads of
environment variables, threads, files that stay open, temporary files, output. Modules that import such a module,
directly or not, cannot be preloaded either.

If every module may be preloaded, the process that tried can go on as if it had imported them as usual: all that is
replaced here for the time of the trial is put back. Otherwise it is spoiled.
"""

from __future__ import annotations

import builtins
import contextlib
import importlib
import importlib.util
import mmap
import os
import random
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import _bootstrap
from importlib.machinery import ExtensionFileLoader, SourceFileLoader, SourcelessFileLoader
from typing import Any

from elastic_agent import linux
from elastic_agent.workers.spawner.fork_safety import UnsafeError, check_fork_safety
from elastic_agent.workers.spawner.installed import is_installed_file, is_own
from elastic_agent.workers.spawner.renewal import RENEWED

_EVERYTHING = "*"
"""In place of a variable's name: the module goes through all variables."""
_ONLY_PREFIX = {"fsspec.config": "FSSPEC_"}
"""Modules that go through all variables, and use those with this prefix."""
_BOUND_TO_WORKER = ("elastic_agent.client", "elastic_agent.integrations")
_HARMLESS_FILES = ("/dev/null", "/dev/zero", "/dev/urandom", "/dev/random", "/proc/", "anon_inode:[event")


class Verdict:
    """The outcome of a trial."""

    def __init__(
        self, accepted: Sequence[str], reads: Mapping[str, str], left_out: Sequence[tuple[str, str, int]]
    ) -> None:
        self.accepted = accepted
        """Those that may be preloaded, in the order in which they are to be imported."""
        self.reads = reads
        """The variables that these read when they are imported, each with one module that does."""
        self.left_out = left_out
        """Modules that may not, each with the reason and the number of further modules that import it."""


Reported = tuple[Sequence[str], Mapping[str, int]]
"""Modules, in the order in which the script's workers imported them; and the variables that the workers changed, with
how many of these modules they had imported by then."""


def try_imports(reported: Callable[[], Reported], of_workers: Sequence[str]) -> Verdict:
    """Import modules, and tell which may be preloaded.

    Args:
        reported: what workers have reported by now. It is called again after the imports, which take seconds, until
            there is nothing more to import.
        of_workers: variables whose values differ between workers.
    """
    mapped = _libraries()
    with _output_in_memory() as output:
        recorder = _Recorder(output)
        recorder.install()
        try:
            imported, names, set_by_script = _import_all(reported)
        finally:
            recorder.uninstall()
    positions = {name: number for number, name in enumerate(names)}
    recorder.judge_reads(set_by_script, of_workers, positions)
    if set_by_script:
        for name, reason in _libraries_that_read(sorted(_libraries() - mapped), set_by_script, positions):
            recorder.faults.setdefault(name, reason)
    return recorder.verdict(imported)


def _import_all(reported: Callable[[], Reported]) -> tuple[list[str], Sequence[str], Mapping[str, int]]:
    """Import until nothing new is reported: what could be imported, and all that was reported."""
    imported: list[str] = []
    tried: set[str] = set()
    names, set_by_script = reported()
    while fresh := [name for name in names if name not in tried]:
        imported += [name for name in fresh if _imports(name)]
        tried.update(fresh)
        names, set_by_script = reported()
    return imported, names, set_by_script


def _imports(name: str) -> bool:
    try:
        importlib.import_module(name)
    except BaseException:  # not a module, or needs what the script did before
        return False
    return True


@contextlib.contextmanager
def _output_in_memory() -> Iterator[int]:
    """Have what is written to standard output and error go to a file in memory."""
    usual = [os.dup(fd) for fd in (1, 2)]
    output = os.memfd_create("elastic-agent-trial")
    for fd in (1, 2):
        os.dup2(output, fd)
    try:
        yield output
    finally:
        for fd, saved in zip((1, 2), usual, strict=True):
            os.dup2(saved, fd)
            os.close(saved)
        os.close(output)


class _Environment(dict[bytes, bytes]):
    """The data behind `os.environ`; reports each name that is read."""

    def __init__(self, data: Mapping[bytes, bytes], read: Callable[[str], None]) -> None:
        super().__init__(data)
        self._read = read

    def __getitem__(self, name: bytes) -> bytes:
        self._read(os.fsdecode(name))
        return super().__getitem__(name)

    def __iter__(self) -> Iterator[bytes]:
        self._read(_EVERYTHING)
        return super().__iter__()


class _Recorder:
    """What each module does while it is executed."""

    def __init__(self, output_fd: int) -> None:
        self.faults: dict[str, str] = {}
        """Modules that may not be preloaded, and why."""
        self._draw: set[str] = set()
        """Modules that draw random numbers from the system, as numpy does for a generator without a seed."""
        self._reads: dict[str, set[str]] = {}
        self._needs: dict[str, set[str]] = {}
        self._running: list[str] = []
        self._output_fd = output_fd
        self._written = 0
        self._threads = len(os.listdir("/proc/self/task"))
        self._files = set(linux.open_files())
        self._shared = _shared_memory()
        self._undo: list[Callable[[], None]] = []

    # --- hooks ------------------------------------------------------------------------------------

    def install(self) -> None:
        for loader in (SourceFileLoader, SourcelessFileLoader, ExtensionFileLoader):
            self._replace(loader, "exec_module", self._executing(loader.exec_module))
        self._replace(ExtensionFileLoader, "create_module", self._creating(ExtensionFileLoader.create_module))
        self._replace(builtins, "__import__", self._importing(builtins.__import__))
        # What `importlib.import_module` calls; modules keep references to that itself.
        _gcd_import = _bootstrap._gcd_import  # type: ignore[attr-defined]
        self._replace(_bootstrap, "_gcd_import", self._importing_module(_gcd_import))
        self._replace(random, "_urandom", self._drawing(random._urandom))  # type: ignore[attr-defined]
        self._replace(tempfile, "_get_candidate_names", self._naming(tempfile._get_candidate_names))  # type: ignore[attr-defined]
        environment = _Environment(os.environ._data, self._read)  # type: ignore[attr-defined]
        self._replace(os.environ, "_data", environment)

    def uninstall(self) -> None:
        environment = os.environ._data  # type: ignore[attr-defined]
        for undo in reversed(self._undo):
            undo()
        os.environ._data.clear()  # type: ignore[attr-defined]
        os.environ._data.update(dict.items(environment))  # type: ignore[attr-defined]
        self._running.clear()

    def _replace(self, holder: Any, name: str, new: Any) -> None:
        old = getattr(holder, name)
        inherited = isinstance(holder, type) and name not in vars(holder)
        self._undo.append(lambda: delattr(holder, name) if inherited else setattr(holder, name, old))
        setattr(holder, name, new)

    def _executing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def exec_module(loader: Any, module: Any) -> None:
            name = module.__name__
            self._needed(name)
            self._running.append(name)
            if name in _BOUND_TO_WORKER:
                self.faults.setdefault(name, "belongs to the worker in which it is imported")
            elif not is_own(name) and not is_installed_file(getattr(loader, "path", "")):
                self.faults.setdefault(name, "is not an installed module")
            try:
                original(loader, module)
            finally:
                self._executed(name)
                self._running.pop()

        return exec_module

    def _creating(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def create_module(loader: Any, spec: Any) -> Any:
            self._needed(spec.name)
            self._running.append(spec.name)
            try:
                return original(loader, spec)
            finally:
                self._running.pop()

        return create_module

    def _importing(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def import_(
            name: str,
            globals: Any = None,  # noqa: A002 - as the original
            locals: Any = None,  # noqa: A002 - as the original
            fromlist: Any = (),
            level: int = 0,
        ) -> Any:
            module = original(name, globals, locals, fromlist, level)
            if self._running:
                found = _absolute(name, globals, level)
                self._needed(found)
                for one in fromlist or ():
                    if f"{found}.{one}" in sys.modules:
                        self._needed(f"{found}.{one}")
            return module

        return import_

    def _importing_module(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def gcd_import(name: str, package: str | None = None, level: int = 0) -> Any:
            module = original(name, package, level)
            self._needed(_absolute(name, {"__package__": package}, level))
            return module

        return gcd_import

    def _naming(self, original: Callable[..., Any]) -> Callable[..., Any]:
        def get_candidate_names() -> Any:
            if self._running:
                self.faults.setdefault(self._running[-1], "creates a temporary file when it is imported")
            return original()

        return get_candidate_names

    def _drawing(self, original: Callable[[int], bytes]) -> Callable[[int], bytes]:
        def urandom(size: int) -> bytes:
            self._draw.update(self._running[-1:])
            return original(size)

        return urandom

    # --- records ----------------------------------------------------------------------------------

    def _needed(self, name: str) -> None:
        if self._running:
            self._needs.setdefault(self._running[-1], set()).add(name)

    def _read(self, variable: str) -> None:
        if self._running:
            self._reads.setdefault(self._running[-1], set()).add(variable)

    def _executed(self, name: str) -> None:
        """A module has run: what did it leave behind that a fork would share, or lose?"""
        running, self._running = self._running, []  # what is done here is not the module's doing
        try:
            self._check(name)
        finally:
            self._running = running

    def _check(self, name: str) -> None:
        for stream in (sys.stdout, sys.stderr):
            if stream is not None:
                stream.flush()
        written = os.fstat(self._output_fd).st_size
        if written > self._written:
            self._written = written
            self.faults.setdefault(name, "prints something when it is imported")
        if len(os.listdir("/proc/self/task")) > self._threads:
            self._check_forks(name)
        self._check_files(name)
        if name in self._draw and _has_numpy_generator(name):
            self.faults.setdefault(name, "makes a random number generator when it is imported")
        if "." not in name:
            self._check_shared_memory(name)

    def _check_forks(self, name: str) -> None:
        try:
            check_fork_safety()
        except UnsafeError as error:
            self.faults.setdefault(name, str(error).removeprefix("an imported module "))
        self._threads = len(os.listdir("/proc/self/task"))

    def _check_files(self, name: str) -> None:
        for path in set(linux.open_files()) - self._files:
            if not path.startswith(_HARMLESS_FILES):
                self.faults.setdefault(name, f"keeps {path} open after it is imported")
            self._files.add(path)

    def _check_shared_memory(self, name: str) -> None:
        shared = _shared_memory()
        if not shared <= self._shared:
            self.faults.setdefault(name, "creates shared memory when it is imported")
            self._shared |= shared
        if linux.children(os.getpid()):
            self.faults.setdefault(name, "starts a process when it is imported")

    # --- the verdict ------------------------------------------------------------------------------

    def judge_reads(
        self, set_by_script: Mapping[str, int], of_workers: Sequence[str], positions: Mapping[str, int]
    ) -> None:
        """Find the modules that read a variable which in a worker has another value than here."""
        for module, variables in self._reads.items():
            if _EVERYTHING in variables and module in _ONLY_PREFIX:
                kept = tuple(one for one in variables if one.startswith(_ONLY_PREFIX[module]))
                variables.intersection_update(kept)
            if _EVERYTHING in variables:
                self.faults.setdefault(module, "reads all environment variables when it is imported")
            for one in sorted(variables):
                if one in of_workers and module not in RENEWED:
                    self.faults.setdefault(module, f"reads {one}, which differs between workers")
                if one in set_by_script and positions.get(module, len(positions)) >= set_by_script[one]:
                    self.faults.setdefault(module, f"reads {one}, which the script sets before")

    def verdict(self, imported: Sequence[str]) -> Verdict:
        causes: dict[str, str] = {}
        for name in {*sys.modules, *self._needs, *imported}:
            self._find_cause(name, causes)
        accepted = [name for name in imported if not causes[name]]
        behind: dict[str, int] = dict.fromkeys(self.faults, 0)
        for name in imported:
            if causes[name] and causes[name] != name:
                behind[causes[name]] += 1
        taken = set(accepted)
        reads = {
            one: module for module, all_ in self._reads.items() if module in taken for one in sorted(all_)
        }
        left_out = [(name, why, behind[name]) for name, why in self.faults.items() if name in causes]
        return Verdict(accepted, reads, left_out)

    def _find_cause(self, start: str, causes: dict[str, str]) -> None:
        """Fill in the module because of which this one may not be preloaded, or an empty string."""
        reached, waiting, cause = {start}, [start], ""
        while waiting and not cause:
            name = waiting.pop()
            if name in self.faults:
                cause = name
            elif causes.get(name):
                cause = causes[name]
            elif name not in causes:
                parent = name.rpartition(".")[0]
                following = {*self._needs.get(name, ()), *((parent,) if parent else ())} - reached
                reached |= following
                waiting.extend(following)
        if cause:
            causes[start] = cause
        else:
            causes.update(dict.fromkeys(reached, ""))


def _has_numpy_generator(name: str) -> bool:
    """Not numpy's own, which is seeded again in each worker."""
    numpy_random = sys.modules.get("numpy.random")
    if numpy_random is None or name.startswith("numpy.random"):
        return False
    kinds = (numpy_random.Generator, numpy_random.RandomState)
    return any(isinstance(value, kinds) for value in list(vars(sys.modules[name]).values()))


def _absolute(name: str, globals_: Any, level: int) -> str:
    if not level:
        return name
    package = (globals_ or {}).get("__package__") or (globals_ or {}).get("__name__", "")
    try:
        return importlib.util.resolve_name("." * level + name, package)
    except (ImportError, ValueError):
        return name


def _shared_memory() -> set[str]:
    """Writable memory that is shared with forked processes, such as the semaphores of multiprocessing."""
    with open("/proc/self/maps") as maps:
        return {line.split()[0] for line in maps if line.split()[1] == "rw-s"}


def _libraries() -> set[str]:
    """The shared libraries of installed packages that are loaded here."""
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip("\n") for line in maps}
    return {path for path in paths if ".so" in path and "-packages/" in path}


def _libraries_that_read(
    libraries: Sequence[str], set_by_script: Mapping[str, int], positions: Mapping[str, int]
) -> Iterator[tuple[str, str]]:
    """Packages with compiled code that contains the name of a variable that the script sets: it may read it."""
    for path in libraries:
        package = path.partition("-packages/")[2].partition("/")[0].partition(".")[0]
        late = [one for one, position in set_by_script.items() if positions.get(package, 0) >= position]
        for name in late:
            if _contains(path, name.encode()):
                yield package, f"may read {name}, which the script sets before"


def _contains(path: str, text: bytes) -> bool:
    try:
        with open(path, "rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
            return content.find(text) >= 0
    except (OSError, ValueError):
        return False
