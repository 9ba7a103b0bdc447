"""Hands a worker modules that were imported in the spawner, when its script imports them.

Until then they are not there: neither in `sys.modules` nor as attributes of packages. A module is handed out together
with what its import brought in, and only if an ordinary search finds the same unchanged files and no variable that they
read has changed. Otherwise the worker imports it itself, from the files.
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder
from itertools import takewhile
from types import ModuleType
from typing import Any

from elastic_agent.integrations import post_import
from elastic_agent.workers.spawner.curated import (
    ONLY_PREFIX,
    READ_AGAIN,
    RENEWED,
    RESEEDED,
    is_read_at_import,
)
from elastic_agent.workers.spawner.fork_safety import UnsafeError
from elastic_agent.workers.spawner.recording import EVERYTHING, MISSING, Record, Recorder, stamp

_OWN = __name__.partition(".")[0]
_THREADS = ("MKL_NUM_THREADS", "OMP_NUM_THREADS")
"""Variables that torch is told of later: how many threads it uses. The first one that is set counts."""


class Preloaded:
    """The modules that the spawner has imported. In a worker it is the first finder of `sys.meta_path`."""

    on_no_effect: Callable[[], object] = bool
    """Called in a worker when something that its script did came too late for these modules."""

    def __init__(self, recorder: Recorder, folder: str) -> None:
        """Take them all out of `sys.modules`. `folder`: where modules of the user were found.

        Raises UnsafeError if a file there would have been imported instead of one of them.
        """
        self._baseline = recorder.baseline
        self._environment = recorder.environment
        self._records = recorder.records
        for name in (*READ_AGAIN, *ONLY_PREFIX):
            if name in self._records:
                self._records[name].reads.clear()
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in recorder.baseline and name.partition(".")[0] != _OWN
        }
        _forget_computed(self._modules, self._records)
        self._attributes = [name for name in self._modules if self._is_attribute(name)]
        """Submodules that the import of their package does not bring in."""
        self._once = {"torch"} | {name.partition(".")[0] for name in self._modules if self._is_compiled(name)}
        """Packages that no process can import twice."""
        self._search = _search_path(self._records.values(), folder)
        self._handed: set[str] = set()
        self._closures = {name: self._reached(name) for name in recorder.roots if name in self._modules}
        self._hide()
        self._finders, self._hooks = list(sys.meta_path), list(sys.path_hooks)
        self._reported: set[str] = set()

    def __len__(self) -> int:
        return len(self._modules)

    # --- before the script ------------------------------------------------------------------------

    def _hide(self) -> None:
        for name in sys.modules.keys() - self._baseline:
            del sys.modules[name]
        for name in self._attributes:
            self._set_attribute(name, self._records[name].previous)
        self._handed.clear()

    def renew(self) -> None:
        """Have modules draw again, in a forked process, what they have drawn from the system for themselves."""
        for name in RESEEDED.keys() & self._modules.keys():
            RESEEDED[name](self._modules[name])
        self._why_not(self._reached_from("torch"))  # copies the memory that it touches while there is time

    def begin(self) -> str:
        """Begin to hand out, in a worker with its environment. Returns why not even torch can be, if it cannot."""
        self._hide()
        sys.meta_path.insert(0, self)
        self._finders, self._hooks = list(sys.meta_path), list(sys.path_hooks)
        atexit.register(self.end)  # before the script registers its functions, so it is called after them
        # Nothing else can have changed yet.
        return self._other_variable(
            [self._records[name] for name in self._reached_from("torch") if name in self._records]
        )

    def end(self) -> None:
        """Have the end of the interpreter destroy all modules; called after the script's threads and functions at exit.

        What is hidden must not outlive the interpreter either: compiled code reports what is left of it.
        """
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)
        for kept in (self._modules, self._closures, self._records):
            kept.clear()
        gc.unfreeze()

    # --- imports of the script --------------------------------------------------------------------

    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Find a module that can be handed out."""
        if name not in self._modules or name in self._handed or name in sys.modules:
            return None
        reason = self._why_not(self._reached_from(name))
        if reason and not self._insists(name, reason):
            return None
        module = self._modules[name]
        spec = ModuleSpec.__new__(ModuleSpec)
        vars(spec).update(vars(_spec(module)))
        spec.name = name
        spec.loader = _Loader(self, name, module, vars(spec).get("loader"))  # type: ignore[assignment]
        return spec

    def hand_out(self, name: str) -> None:
        """Put a module, and what its import brought in, where an import would have put them."""
        reached = set(self._reached_from(name)) - self._handed
        new = [module for module in self._modules if module in reached]  # in the order of the imports
        for module in new:
            sys.modules.setdefault(module, self._modules[module])
            if module in self._records:
                self._set_variables(self._records[module].sets)
        self._handed.update(module for module in new if sys.modules[module] is self._modules[module])
        for module in reached.intersection(self._attributes):
            self._set_attribute(module, self._modules[module])
        if "torch" in reached:
            self._set_threads(sys.modules["torch"])
        for module in filter(reached.__contains__, RENEWED):
            RENEWED[module](self._modules[module])
        for module in filter(reached.__contains__, post_import.INTEGRATIONS):
            post_import.install(module)

    def _set_attribute(self, name: str, value: object) -> None:
        """Have the package around a module refer to it, or to this value."""
        package, _, child = name.rpartition(".")
        namespace = _namespace(self._modules.get(package) or sys.modules.get(package))
        if value is MISSING:
            namespace.pop(child, None)
        else:
            namespace[child] = value

    def _set_variables(self, variables: Mapping[str, str | None]) -> None:
        """Set the variables that an import sets; they have not changed then."""
        for name, content in variables.items():
            for environment in (os.environ, self._environment):
                environment.pop(name, None)
                environment.update({name: content} if content is not None else {})

    def _set_threads(self, torch: Any) -> None:
        changed = any(os.environ.get(name) != self._environment.get(name) for name in _THREADS)
        count = next((os.environ[name] for name in _THREADS if name in os.environ), "")
        if changed and _is_count(count):
            torch.set_num_threads(int(count))

    def _insists(self, name: str, reason: str) -> bool:
        """Decide whether a module is handed out that should not be: packages that no process can import twice are."""
        package = name.partition(".")[0]
        if package not in self._once or (package in sys.modules and package not in self._handed):
            return False
        line = f"elastic-agent: {reason} after {package} was preloaded, which has no effect; use --worker-start cold"
        if line not in self._reported and sys.stderr is not None:
            print(line, file=sys.stderr)
        if not self._reported:
            self.on_no_effect()
        self._reported.add(line)
        return True

    # --- the conditions ---------------------------------------------------------------------------

    def _why_not(self, reached: Iterable[str]) -> str:
        """Return why an import now would not come to the same as these modules; empty if it would."""
        records = []
        for name in reached:
            record = self._records.get(name)
            if record is None or name not in self._modules:
                continue
            has_other = name in sys.modules and sys.modules[name] is not self._modules[name]
            if has_other and record.file is not None:  # compiled code makes several modules of one name
                return f"sys.modules has got another {name}"
            if name not in self._handed:
                records.append(record)
        return self._other_variable(records) or self._other_search(records) or _changed_file(records)

    def _other_variable(self, records: Sequence[Record]) -> str:
        """Look for variables that an import would read, and that differ from those of the spawner."""
        now, then = dict(os.environ), self._environment
        differing = {name for name in now.keys() | then.keys() if now.get(name) != then.get(name)}
        read = set[str]().union(*(record.reads for record in records))
        prefixes = tuple(ONLY_PREFIX[record.name] for record in records if record.name in ONLY_PREFIX)
        changed = {name for name in differing if {name, EVERYTHING} & read or name.startswith(prefixes)}
        if any(record.name in self._once for record in records):  # loads compiled code, which reads them
            changed |= {
                name
                for name in differing
                if is_read_at_import(name, now.get(name)) or is_read_at_import(name, then.get(name))
            }
        if any(record.name == "torch" for record in records):
            changed -= {name for name in _THREADS if _is_count(os.environ.get(name, ""))}
        were = "was" if len(changed) == 1 else "were"
        return f"{', '.join(sorted(changed))} {were} changed" if changed else ""

    def _other_search(self, records: Sequence[Record]) -> str:
        before_paths = takewhile(lambda finder: finder is not PathFinder, sys.meta_path)
        if any(finder not in self._finders for finder in before_paths) or sys.path_hooks != self._hooks:
            return "an import hook was added"
        other = self._search.other(_names_searched(records))
        return f"sys.path leads to another {other}" if other else ""

    # --- closures ---------------------------------------------------------------------------------

    def _reached_from(self, name: str) -> Iterable[str]:
        """Return the modules that an import of this one imports, and their packages; it is one of them."""
        return self._closures.get(name) or self._reached(name)

    def _reached(self, start: str) -> set[str]:
        """Follow imports, but for those of modules that have been handed out."""
        reached = {start}
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name in self._handed or name not in self._records:
                continue
            for needed in (name.rpartition(".")[0], *self._records[name].needs):
                if needed in self._modules and needed not in reached:
                    reached.add(needed)
                    waiting.append(needed)
        return reached

    def _is_attribute(self, name: str) -> bool:
        """Return whether the package around a module has it as an attribute that the package's own import does
        not set."""
        package, _, child = name.rpartition(".")
        if name not in self._records or (package in self._records and name in self._records[package].needs):
            return False
        return _namespace(sys.modules.get(package)).get(child) is self._modules[name]

    def _is_compiled(self, name: str) -> bool:
        spec = _spec(self._modules[name])
        return isinstance(spec.loader, ExtensionFileLoader) and "-packages" in (spec.origin or "")


class _Loader:
    """Hands out one module in an import."""

    def __init__(self, preloaded: Preloaded, name: str, module: ModuleType, loader: Any) -> None:
        self._preloaded = preloaded
        self._name = name
        self._module = module
        self._loader = loader
        self._namespace = dict(_namespace(module))

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._module

    def exec_module(self, module: ModuleType) -> None:
        namespace = _namespace(module)
        for attribute in namespace.keys() - self._namespace.keys():  # the import has set them
            del namespace[attribute]
        namespace.update(self._namespace)
        self._preloaded.hand_out(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


# --- the search path ------------------------------------------------------------------------------

_Place = tuple[str, ...]
"""The file of a module, or the folders of a package without `__init__`; none of either: it is not in `sys.path`."""


class _SearchPath:
    """Tells whether a search of `sys.path` for top-level modules still ends where it ended in the spawner."""

    def __init__(self, expected: Mapping[str, _Place]) -> None:
        """Begin with the present path, in which the searches for these names end at these places."""
        self._expected = expected
        self._state: list[tuple[str, int | None]] = []
        self._found: dict[str, _Place] = {}
        """The places where searches end while `sys.path` and its folders are in that state."""

    def other(self, names: Iterable[str]) -> str:
        """Return one of these names for which the search ends elsewhere now; empty if there is none."""
        state = [(entry, _changed_ns(entry)) for entry in sys.path]
        if state != self._state:
            self._state, self._found = state, {}
        for name in self._expected.keys() & names:
            if name not in self._found:
                self._found[name] = _place(PathFinder.find_spec(name))
            if self._found[name] != self._expected[name]:
                return name
        return ""


def _search_path(records: Iterable[Record], folder: str) -> _SearchPath:
    """Return the search path of workers, in which `folder` comes first.

    Raises UnsafeError if there is a module in the folder with the name of one that is imported already.
    """
    names = {name for name in _names_searched(records) if "." not in name}
    imported = names & sys.modules.keys()
    expected = {name: _place(PathFinder.find_spec(name)) for name in names - imported}
    sys.path.append(folder)  # where modules of --preload are
    for name in imported:
        place = _place(_spec(sys.modules[name]))
        if place == _place(PathFinder.find_spec(name)):  # else it is another finder's
            expected[name] = place
    sys.path.pop()
    sys.path.insert(0, folder)
    search = _SearchPath(expected)
    shadowed = search.other(imported)
    search.other(expected)
    place = _place(PathFinder.find_spec(shadowed)) if shadowed else ()
    sys.path.remove(folder)
    if place:
        raise UnsafeError(f"{place[0]} has the name of a module that is already imported")
    return search


def _names_searched(records: Iterable[Record]) -> set[str]:
    return set[str]().union(*({record.name, *record.looked_up} for record in records))


def _place(spec: ModuleSpec | None) -> _Place:
    if spec is not None and spec.has_location:
        return (spec.origin or "",)
    return tuple(spec.submodule_search_locations or ()) if spec is not None else ()


def _changed_ns(entry: str) -> int | None:
    try:
        return os.stat(entry or ".").st_mtime_ns
    except OSError:
        return None


# --- modules --------------------------------------------------------------------------------------


def _is_count(value: str) -> bool:
    return value.isdecimal() and int(value) > 0


def _namespace(module: object) -> dict[str, Any]:
    """Return the attributes of a module, or of what stands for one in `sys.modules`, none that would be computed."""
    return getattr(module, "__dict__", {})


def _spec(module: object) -> ModuleSpec:
    spec = _namespace(module).get("__spec__")
    return spec if isinstance(spec, ModuleSpec) else ModuleSpec("", None)


def _forget_computed(modules: Iterable[str], records: Mapping[str, Record]) -> None:
    """Remove the attributes that modules have computed, and the lines of source that tracebacks have read.

    Here, once, and not in every worker.
    """
    for name in records.keys() & modules:
        namespace = _namespace(sys.modules[name])
        for key in [key for key, value in namespace.items() if records[name].has_computed(key, value)]:
            del namespace[key]
    if "linecache" in sys.modules:
        sys.modules["linecache"].clearcache()


def _changed_file(records: Sequence[Record]) -> str:
    for record in records:
        if record.file is not None and stamp(record.file) != record.stamp:
            return f"{record.file} was changed"
    return ""
