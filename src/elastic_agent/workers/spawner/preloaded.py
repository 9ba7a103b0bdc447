"""Hands a worker modules that were imported in the spawner, when its script imports them.

Until then they are not there: neither in `sys.modules` nor as attributes of packages, and what they have entered in
registries is taken out. A module is handed out together with what its import brought in, and only if an import now
would come to the same. Otherwise the worker imports it itself, from the files.
"""

from __future__ import annotations

import atexit
import gc
import inspect
import logging
import operator
import os
import signal
import sys
import warnings
from collections.abc import Callable, Iterable, Sequence
from importlib.machinery import ExtensionFileLoader, ModuleSpec, PathFinder, SourceFileLoader
from itertools import takewhile
from types import CodeType, ModuleType
from typing import Any

from elastic_agent.integrations import post_import
from elastic_agent.workers.spawner.curated import ONLY_PREFIX, READ_AGAIN, RENEWED, RESEEDED
from elastic_agent.workers.spawner.fork_safety import UnsafeError
from elastic_agent.workers.spawner.import_variables import is_read_at_import
from elastic_agent.workers.spawner.recording import EVERYTHING, MISSING, Record, Recorder, stamp
from elastic_agent.workers.spawner.search_path import SearchPath

_OWN = __name__.partition(".")[0]
_CONSIDERED = {"argv", "path"}
"""Attributes of `sys` that may change: the search path is looked at anyway, and no curated package looks at the
arguments when it is imported."""
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
        self._filters = recorder.filters
        self._records = recorder.records
        self._modules = {
            name: module
            for name, module in sys.modules.items()
            if name not in recorder.baseline and name.partition(".")[0] != _OWN
        }
        for name in (*READ_AGAIN, *ONLY_PREFIX):
            if name in self._records:
                self._records[name].reads.clear()
        kept = {self._records[name] for name in self._modules if name in self._records}
        self._effects = [
            (record, kind, value)
            for record, kind, value in recorder.effects
            if record in kept and (kind != "filter" or value[0] in warnings.filters)
        ]
        recorder.effects.clear()
        _forget_computed(kept)
        self._attributes = {name: name.rpartition(".") for name in self._modules if self._is_attribute(name)}
        self._once = {"torch"} | {name.partition(".")[0] for name in self._modules if self._is_compiled(name)}
        """Packages that no process can import twice."""
        self._anonymous = {name for name, module in self._modules.items() if not _spec(module).name}
        """Modules that compiled code makes, several for one name."""
        main = sys.modules["__main__"]
        self._aliases_of_main = [name for name, module in self._modules.items() if module is main]
        """Names of modules that are to be the worker's main module: `__mp_main__`, by which children pickle classes."""
        self._uses_of_main = {
            name: attributes
            for name, module in self._modules.items()
            if (attributes := _uses_of(main, module))
        }
        """Attributes of modules that are to be the worker's main module."""
        self._out_of_date = {*self._attributes, *self._uses_of_main, *RENEWED, *post_import.INTEGRATIONS}
        """Modules that differ from what an import would make of them."""
        self._path = self._search_path(folder)
        self._handed: set[str] = set()
        self._closures = {name: self._reached(name) for name in recorder.roots if name in self._modules}
        self._namespaces: dict[str, dict[str, Any]] = {}
        self.hide()
        self._namespaces = {name: dict(_namespace(module)) for name, module in self._modules.items()}
        self._finders, self._hooks = list(sys.meta_path), list(sys.path_hooks)
        self._reported: set[str] = set()

    def _is_compiled(self, name: str) -> bool:
        spec = _spec(self._modules[name])
        return isinstance(spec.loader, ExtensionFileLoader) and "-packages" in (spec.origin or "")

    def _search_path(self, folder: str) -> SearchPath:
        looked_up = set[str]().union(*(record.looked_up for record in self._records.values()))
        path = SearchPath({name for name in (*self._records, *looked_up) if "." not in name}, folder)
        if path.shadowing:
            raise UnsafeError(f"{path.shadowing} has the name of a module that is already imported")
        return path

    def __len__(self) -> int:
        return len(self._modules)

    # --- before the script ------------------------------------------------------------------------

    def hide(self) -> None:
        """Leave what a fresh Python has."""
        for _, kind, value in reversed(self._effects):
            if kind == "replaced":
                module, key, old, _ = value
                setattr(module, key, old)
            elif kind == "finder" and value[1] in sys.meta_path:
                sys.meta_path.remove(value[1])
        for name, attributes in self._uses_of_main.items():
            for attribute in attributes:  # or hidden modules would keep the spawner's alive
                setattr(self._modules[name], attribute, None)
        for name in sys.modules.keys() - self._baseline:
            del sys.modules[name]
            if name in self._attributes:
                self._set_attribute(name, self._records[name].previous)
        self._handed.clear()
        logging.Logger.manager.loggerDict.clear()
        warnings.resetwarnings()
        for item in self._filters:
            warnings._add_filter(*item, append=True)  # type: ignore[attr-defined]

    def begin(self) -> str:
        """Begin to hand out, in a worker with its environment. Returns why not even torch can be, if it cannot."""
        self.hide()
        sys.meta_path.insert(0, self)
        self._finders, self._hooks = list(sys.meta_path), list(sys.path_hooks)
        atexit.register(self.end)  # before the script registers its functions, so it is called after them
        _ignore_interrupts_then()
        # Nothing else can have changed yet.
        return self._other_variable(
            [self._records[name] for name in self._reached_from("torch") if name in self._records]
        )

    def renew(self) -> None:
        """Have modules draw again, in a forked process, what they have drawn from the system for themselves."""
        for name in RESEEDED.keys() & self._modules.keys():
            RESEEDED[name](self._modules[name])
        self._why_not(self._reached_from("torch"))  # copies the memory that it touches while there is time

    def end(self) -> None:
        """Have the end of the interpreter destroy all modules; called after the script's threads and functions at exit.

        What is hidden must not outlive the interpreter either: compiled code reports what is left of it.
        """
        for name, module in self._modules.items():
            sys.modules.setdefault(name, module)
        for kept in (self._modules, self._namespaces, self._closures, self._records):
            kept.clear()
        self._effects = []
        gc.unfreeze()

    def watch(self) -> None:
        """Remember how the modules are that a fresh Python has, as the script is to begin."""
        for name in self._aliases_of_main:
            self._modules[name] = sys.modules["__main__"]
        for name in self._baseline & sys.modules.keys():
            self._namespaces[name] = dict(_namespace(sys.modules[name]))

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
        spec.loader = _Loader(self, name, vars(spec).get("loader"), _namespace(module))  # type: ignore[assignment]
        return spec

    def hand_out(self, name: str) -> None:
        """Put a module, and what its import brought in, where an import would have put them."""
        reached = set(self._reached_from(name)) - self._handed
        new = [module for module in self._modules if module in reached]  # in the order of the imports
        for module in new:
            sys.modules.setdefault(module, self._modules[module])
        self._handed.update(module for module in new if sys.modules[module] is self._modules[module])
        records = {self._records[module] for module in new if module in self._records}
        for record, kind, value in self._effects:
            if record in records:
                self._enter(kind, value)
        if "torch" in new:
            self._set_threads(sys.modules["torch"])
        # Not all of them: to look at the others takes a millisecond.
        for module in filter(self._out_of_date.__contains__, new):
            self._bring_up_to_date(module)

    def _set_threads(self, torch: Any) -> None:
        changed = any(os.environ.get(name) != self._environment.get(name) for name in _THREADS)
        count = next((os.environ[name] for name in _THREADS if name in os.environ), "")
        if changed and _is_count(count):
            torch.set_num_threads(int(count))

    def _bring_up_to_date(self, name: str) -> None:
        """Let a module be as an import here and now would have made it."""
        module = self._modules[name]
        if name in self._attributes:
            self._set_attribute(name, module)
        for attribute in self._uses_of_main.get(name, ()):
            setattr(module, attribute, sys.modules["__main__"])
        if name in RENEWED:
            RENEWED[name](module)
        if name in post_import.INTEGRATIONS:
            post_import.install(name)
        if name in RENEWED or name in post_import.INTEGRATIONS:
            self._namespaces[name] = dict(_namespace(module))

    def _enter(self, kind: str, value: Any) -> None:
        """Make an entry in a registry, or in the environment."""
        match kind, value:
            case "variable", (name, content):
                for environment in (os.environ, self._environment):
                    environment.pop(name, None)
                    environment.update({name: content} if content is not None else {})
            case "filter", (item, append):
                warnings._add_filter(*item, append=append)  # type: ignore[attr-defined]
            case "exit", (function, args, kwargs):
                atexit.register(function, *args, **kwargs)
            case "finder", (is_last, finder):
                sys.meta_path.insert(len(sys.meta_path) if is_last else 0, finder)
                self._finders.append(finder)
            case "replaced", (module, key, _, new) if not self._has_unknown(module, key):
                setattr(module, key, new)
                self._namespaces.get(module.__name__, {})[key] = new
            case "logger", logger:
                _register_logger(logger)

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

    def _why_not(self, reached: Sequence[str]) -> str:
        """Return why an import now would not come to the same as these modules; empty if it would."""
        new = []
        for name in reached:
            module, own = sys.modules.get(name, MISSING), self._modules.get(name, MISSING)
            if module is own or (name in self._anonymous and module is not None):
                new += [name] if name not in self._handed and own is not MISSING else []
            elif name in self._handed:
                return f"{name} was replaced in sys.modules"
            elif module is not MISSING and name not in self._baseline:
                return f"sys.modules has got another {name}"
            elif own is not MISSING:
                new.append(name)
        records = [self._records[name] for name in new if name in self._records]
        return (
            self._other_variable(records)
            or self._other_search(records)
            or _changed_file(records)
            or self._other_attribute(records)
            or self._other_entry(records)
        )

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
        names = {record.name for record in records if "." not in record.name}
        other = self._path.other(names.union(*(record.looked_up for record in records)))
        return f"sys.path leads to another {other}" if other else ""

    def _other_attribute(self, records: Sequence[Record]) -> str:
        """Look for attributes that were replaced in modules, and that others, which import these, name at import."""
        new = {record.name for record in records}
        for name in set[str]().union(*(record.needs for record in records)) - new - {"__main__"}:
            changed = self._changed(name, sys.modules.get(name))
            if not changed:
                continue
            for record in records:
                if name in record.needs and (named := _named(changed, record)):
                    return f"{name}.{min(named)} was replaced"
        return ""

    def _changed(self, name: str, module: object) -> set[str]:
        """Return the attributes of a module that have changed; further submodules do not count."""
        before, now = self._namespaces.get(name), _namespace(module)
        if before is None or (
            len(before) == len(now) and all(map(operator.is_, before.values(), map(now.get, before)))
        ):
            return set()
        changed = {key for key, value in before.items() if now.get(key, MISSING) is not value}
        added = now.keys() - before.keys()
        changed |= {key for key in added if now[key] is not sys.modules.get(f"{name}.{key}", MISSING)}
        if name in self._records:
            changed = {key for key in changed if not self._records[name].has_computed(key, now.get(key))}
        return changed - _CONSIDERED if name == "sys" else changed

    def _other_entry(self, records: Sequence[Record]) -> str:
        """Look for loggers that these modules would have found made already, and functions, replaced."""
        among, loggers = set(records), logging.Logger.manager.loggerDict
        for record, kind, value in self._effects:
            if record not in among:
                continue
            if kind == "logger" and isinstance(loggers.get(value.name), logging.Logger):
                return f"the logger {value.name} was made"
            if kind == "replaced" and self._has_unknown(*value[:2]):
                return f"{value[0].__name__}.{value[1]} was replaced"
        return ""

    def _has_unknown(self, module: ModuleType, key: str) -> bool:
        """Tell whether the module has another function than those that preloaded modules put there."""
        replaced = [value for _, kind, value in self._effects if kind == "replaced"]
        known = [
            value for holder, name, *values in replaced if (holder, name) == (module, key) for value in values
        ]
        return all(getattr(module, key, MISSING) is not value for value in known)

    # --- closures ---------------------------------------------------------------------------------

    def _reached_from(self, name: str) -> list[str]:
        """Return the modules that an import of this one imports, and their packages; it is one of them."""
        return self._closures.get(name) or self._reached(name)

    def _reached(self, start: str) -> list[str]:
        """Follow imports, but for those of modules that have been handed out."""
        reached = {start}
        waiting = [start]
        while waiting:
            name = waiting.pop()
            if name in self._handed or name not in self._records:
                continue
            for needed in (name.rpartition(".")[0], *self._records[name].needs):
                if needed and needed not in reached and needed not in self._baseline:
                    reached.add(needed)
                    waiting.append(needed)
        return [name for name in reached if name.partition(".")[0] != _OWN]

    def _is_attribute(self, name: str) -> bool:
        """Return whether the package around a module has it as an attribute that the package's own import does
        not set."""
        package, _, child = name.rpartition(".")
        if name not in self._records or (package in self._records and name in self._records[package].needs):
            return False
        return _namespace(sys.modules.get(package)).get(child) is self._modules[name]

    def _set_attribute(self, name: str, value: object) -> None:
        package, _, child = self._attributes[name]
        namespace = _namespace(self._modules.get(package) or sys.modules.get(package))
        for attributes in (namespace, self._namespaces.get(package, {})):
            if value is MISSING:
                attributes.pop(child, None)
            else:
                attributes[child] = value


def _ignore_interrupts_then() -> None:
    """Have SIGINT do nothing, also if it came shortly before, when functions are called that were registered earlier.

    At the end of a plain Python, hardly any code runs that it could interrupt: here, what was preloaded is destroyed.
    These are functions in C, called in the opposite order: one in Python would be interrupted itself.
    """
    before: dict[str, object] = {}
    atexit.register(vars(sys).update, before)
    atexit.register(signal.signal, signal.SIGINT, operator.is_)
    # The second one raises KeyboardInterrupt instead, if it is due.
    atexit.register(signal.signal, signal.SIGINT, operator.is_)
    atexit.register(setattr, sys, "unraisablehook", bool)
    atexit.register(before.update, vars(sys))


class _Loader:
    """Hands out one module in an import."""

    def __init__(self, preloaded: Preloaded, name: str, loader: Any, namespace: dict[str, Any]) -> None:
        self._preloaded = preloaded
        self._name = name
        self._loader = loader
        self._namespace = dict(namespace)

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        return self._preloaded._modules[self._name]

    def exec_module(self, module: ModuleType) -> None:
        namespace = _namespace(module)
        for attribute in namespace.keys() - self._namespace.keys():  # the import has set them
            del namespace[attribute]
        namespace.update(self._namespace)
        self._preloaded.hand_out(self._name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)


def _is_count(value: str) -> bool:
    return value.isdecimal() and int(value) > 0


def _namespace(module: object) -> dict[str, Any]:
    """Return the attributes of a module, or of what stands for one in `sys.modules`, none that would be computed."""
    return getattr(module, "__dict__", {})


def _spec(module: object) -> ModuleSpec:
    spec = _namespace(module).get("__spec__")
    return spec if isinstance(spec, ModuleSpec) else ModuleSpec("", None)


def _uses_of(main: ModuleType, module: object) -> list[str]:
    """Return the attributes of a module that are the main module."""
    return [name for name, value in _namespace(module).items() if value is main]


def _forget_computed(records: Iterable[Record]) -> None:
    """Remove the attributes that modules have computed, and the lines of source that tracebacks have read.

    Here, once, and not in every worker.
    """
    for record in records:
        namespace = _namespace(sys.modules[record.name])
        for name in [name for name, value in namespace.items() if record.has_computed(name, value)]:
            del namespace[name]
    if "linecache" in sys.modules:
        sys.modules["linecache"].clearcache()


def _changed_file(records: Sequence[Record]) -> str:
    for record in records:
        if record.file is not None and stamp(record.file) != record.stamp:
            return f"{record.file} was changed"
    return ""


def _named(names: set[str], record: Record) -> set[str]:
    """Return those of these names that occur in the parts of a module's source that run when it is imported.

    All of them if its source is in no file of its own.
    """
    if record.file is None or not record.file.endswith(".py"):
        return set()
    loader = SourceFileLoader(record.name, record.file)
    try:
        source = loader.get_data(record.file)
    except OSError:  # in an archive
        return names
    if not any(name.encode() in source for name in names):  # to look at the code takes ten times as long
        return set()
    found, waiting = set[str](), [loader.get_code(record.name)]
    for code in filter(None, waiting):
        found.update(code.co_names)
        waiting += [part for part in code.co_consts if isinstance(part, CodeType) and _runs_at_import(part)]
    return names & found


def _runs_at_import(code: CodeType) -> bool:
    """Tell whether it is the body of a class or of a comprehension, and not that of a function."""
    is_of_class = not code.co_flags & inspect.CO_NEWLOCALS
    return is_of_class or (code.co_name.startswith("<") and code.co_name != "<lambda>")


def _register_logger(logger: logging.Logger) -> None:
    """Enter it as `logging.getLogger` does; its handlers write to the present standard error, as new ones would."""
    manager = logging.Logger.manager
    placeholder = manager.loggerDict.get(logger.name)
    manager.loggerDict[logger.name] = logger
    if isinstance(placeholder, logging.PlaceHolder):
        manager._fixupChildren(placeholder, logger)  # type: ignore[attr-defined]
    manager._fixupParents(logger)  # type: ignore[attr-defined]
    logger._cache.clear()  # type: ignore[attr-defined]
    for handler in logger.handlers:
        if getattr(vars(handler).get("stream"), "name", "") == "<stderr>":
            vars(handler)["stream"] = sys.stderr
