"""Records, in the spawner, what each module does when it is imported, so that a worker can be handed it later.

The spawner's program begins with this, before all other imports, and therefore it uses none itself: whatever a fresh
Python has not imported yet is recorded, the standard library included.
"""

import _frozen_importlib as bootstrap
import builtins
import os
import sys

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
    from importlib.machinery import ModuleSpec
    from types import ModuleType
    from typing import Any

EVERYTHING = "*"
"""In place of a variable's name: all variables of the environment are read."""

MISSING = object()
"""Stands for an attribute or a module that is not there."""


def stamp(path: str) -> "tuple[int, int] | None":
    """Return when a file was modified, in nanoseconds, and its size; None if it is not there."""
    try:
        found = os.stat(path)
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size


class Record:
    """The import of one module."""

    __slots__ = ("file", "lazy_beyond", "looked_up", "name", "needs", "previous", "reads", "stamp")

    def __init__(self, name: str, file: "str | None" = None) -> None:
        self.name = name
        self.needs: dict[str, None] = {}
        """The modules that it imported, in this order."""
        self.looked_up: set[str] = set()
        """The top-level names that it searched for, whether or not there are such modules."""
        self.reads: set[str] = set()
        """The environment variables that it read, `EVERYTHING` if it went through all."""
        self.previous: object = MISSING
        """The attribute of this name that the package around it had before."""
        self.lazy_beyond: frozenset[str] | None = None
        """The attributes after the import, if the module computes further ones when they are used (PEP 562)."""
        self.file = file
        self.stamp = stamp(file) if file is not None else None

    def has_computed(self, attribute: str, value: object) -> bool:
        """Tell whether the module has got this attribute from one of its submodules, when it was used."""
        if self.lazy_beyond is None or attribute in self.lazy_beyond:
            return False
        return str(getattr(value, "__module__", "")).startswith(f"{self.name}.")


class Recorder:
    """Records all imports from :meth:`begin` to :meth:`end`. It is the first finder of ``sys.meta_path`` meanwhile."""

    def __init__(self, baseline: "frozenset[str]") -> None:
        """Record all but `baseline`: the modules that a fresh Python has imported."""
        self.baseline = baseline
        self.records: dict[str, Record] = {}
        self.effects: list[tuple[Record, str, Any]] = []
        """The variables set in the environment, and the entries made in registries of the interpreter: in this
        order."""
        self.environment = dict(os.environ)
        self.roots: list[str] = []
        """The modules that were imported for scripts."""
        self.replaces: Mapping[str, Sequence[tuple[str, str]]] = {}
        """Modules that replace attributes of other ones when they are imported: of which modules, and which."""
        self._originals: dict[tuple[str, str], object] = {}
        self._running: list[Record] = []
        self._known: set[str] = set()
        self._finders: list[object] = []
        self._undo: list[Callable[[], None]] = []

    def begin(self) -> None:
        """Start to record. What is registered with these modules is recorded too, so they are imported first."""
        self._known.update(sys.modules)
        sys.meta_path.insert(0, self)
        self._finders.extend(sys.meta_path)
        self._replace(builtins, "__import__", self._importing)
        # What importlib.import_module calls; packages keep references to that one itself.
        self._replace(bootstrap, "_gcd_import", self._importing_module)
        self._replace(bootstrap, "_load_unlocked", self._loading)
        environment = _Environment(os.environ._data, self._read, self._set)  # type: ignore[attr-defined]
        for mapping in (os.environ, os.environb):
            self._replace(mapping, "_data", lambda _: environment)
        import atexit
        import logging
        import warnings

        self.filters = warnings.filters[:]
        self._replace(warnings, "_add_filter", self._filtering)
        self._replace(atexit, "register", self._registering)
        self._replace(logging.Manager, "getLogger", self._logging)

    def end(self) -> None:
        """Stop, and have everything as it was."""
        environment = {**os.environ._data}  # type: ignore[attr-defined]
        for undo in reversed(self._undo):
            undo()
        original = os.environ._data  # type: ignore[attr-defined]
        original.clear()
        original.update(environment)
        sys.meta_path.remove(self)
        for kept in (self._finders, self._undo):
            kept.clear()  # modules may keep this object, and are not to keep each other by it
        self._originals.clear()

    def _replace(self, holder: "Any", name: str, substitute: "Callable[[Any], Any]") -> None:
        old = getattr(holder, name)
        self._undo.append(lambda: setattr(holder, name, old))
        setattr(holder, name, substitute(old))

    def import_(self, name: str, attributes: "Sequence[str]" = ()) -> None:
        """Import a module, and such attributes of it, as scripts do."""
        self.roots.append(name)
        __import__(name, fromlist=attributes)

    # --- hooks ------------------------------------------------------------------------------------

    def find_spec(
        self, name: str, path: "Sequence[str] | None" = None, target: "ModuleType | None" = None
    ) -> None:
        """Note what is searched for; the other finders find it."""
        if self._running and "." not in name and name not in sys.builtin_module_names:
            self._running[-1].looked_up.add(name)

    def _loading(
        self, original: "Callable[[ModuleSpec], ModuleType]"
    ) -> "Callable[[ModuleSpec], ModuleType]":
        def load(spec: "ModuleSpec") -> "ModuleType":
            if self._running:
                self._note_unfound(self._running[-1])  # before this module is there, too
            record = self._record(spec.name, spec.origin if spec.has_location else None)
            self._note_originals(self.replaces.get(spec.name, ()))
            self._running.append(record)
            try:
                return original(spec)
            finally:
                self._note_unfound(record)
                self._note_lazy(record)
                self._running.pop()
                self._note_replaced(record)
                if spec.name not in sys.modules:  # it could not be imported
                    self._known.discard(spec.name)

        return load

    def _note_originals(self, places: "Iterable[tuple[str, str]]") -> None:
        """Remember what modules have as these attributes, as far as they are imported."""
        for holder, attribute in places:
            if holder in sys.modules:
                self._originals[holder, attribute] = getattr(sys.modules[holder], attribute, MISSING)

    def _note_replaced(self, owner: Record) -> None:
        """Attribute to a module what it has replaced in others, which it may have imported itself."""
        for place in self.replaces.get(owner.name, ()):
            before = self._originals.get(place, MISSING)
            self._note_originals((place,))
            after = self._originals.get(place, MISSING)
            if before is not MISSING and after is not before:
                self.effects.append((owner, "replaced", (sys.modules[place[0]], place[1], before, after)))
        own = {place for places in self.replaces.values() for place in places if place[0] == owner.name}
        self._note_originals(own)

    def _record(self, name: str, file: "str | None") -> Record:
        self._need(name)
        record = self.records.get(name)
        if record is None:
            record = self.records[name] = Record(name, file)
            package, _, child = name.rpartition(".")
            if package in sys.modules:
                record.previous = getattr(sys.modules[package], "__dict__", {}).get(child, MISSING)
        self._known.add(name)
        return record

    def _note_unfound(self, owner: Record) -> None:
        """Attribute to a module what it has put into `sys.modules` and `sys.meta_path` itself."""
        if len(sys.modules) != len(self._known):
            for name in sys.modules.keys() - self._known:
                self._known.add(name)
                self.records[name] = Record(name)
                self.records[name].needs[owner.name] = None
                owner.needs[name] = None
        for finder in sys.meta_path:
            if finder not in self._finders:
                self._finders.append(finder)
                self.effects.append((owner, "finder", (sys.meta_path.index(finder) > 1, finder)))

    def _note_lazy(self, record: Record) -> None:
        module = sys.modules.get(record.name)
        if record.lazy_beyond is None and (
            "__getattr__" in getattr(module, "__dict__", ()) or hasattr(type(module), "__getattr__")
        ):
            record.lazy_beyond = frozenset(vars(module))

    def _source_of(self, name: str, attribute: str) -> "str | None":
        """Return the module that a lazily computed attribute comes from; whoever used it first has imported that."""
        record = self.records.get(name)
        value = getattr(sys.modules.get(name), "__dict__", {}).get(attribute)
        return value.__module__ if record is not None and record.has_computed(attribute, value) else None

    def _need(self, name: str) -> None:
        if self._running and self._running[-1].name != name:
            self._running[-1].needs[name] = None

    def _importing(self, original: "Callable[..., Any]") -> "Callable[..., Any]":
        def import_(
            name: str,
            globals: "Any" = None,  # noqa: A002 - as the original
            locals: "Any" = None,  # noqa: A002 - as the original
            fromlist: "Any" = (),
            level: int = 0,
        ) -> "Any":
            if not self._running:
                return original(name, globals, locals, fromlist, level)
            found = _absolute(name, globals, level)
            self._need(found)
            module = original(name, globals, locals, fromlist, level)
            for attribute in fromlist or ():
                if f"{found}.{attribute}" in sys.modules:
                    self._need(f"{found}.{attribute}")
                elif (source := self._source_of(found, attribute)) is not None:
                    self._need(source)
            return module

        return import_

    def _importing_module(self, original: "Callable[..., Any]") -> "Callable[..., Any]":
        def gcd_import(name: str, package: "str | None" = None, level: int = 0) -> "Any":
            self._need(_absolute(name, {"__package__": package}, level))
            return original(name, package, level)

        return gcd_import

    def _read(self, name: str) -> None:
        if self._running:
            self._running[-1].reads.add(name)

    def _set(self, name: str, value: "str | None") -> None:
        if self._running:
            self.effects.append((self._running[-1], "variable", (name, value)))

    def _filtering(self, original: "Callable[..., None]") -> "Callable[..., None]":
        def add_filter(*item: object, append: bool) -> None:
            original(*item, append=append)
            if self._running:
                self.effects.append((self._running[-1], "filter", (item, append)))

        return add_filter

    def _registering(self, original: "Callable[..., Any]") -> "Callable[..., Any]":
        def register(function: "Any", /, *args: object, **kwargs: object) -> "Any":
            if not self._running:
                return original(function, *args, **kwargs)
            self.effects.append((self._running[-1], "exit", (function, args, kwargs)))
            return function

        return register

    def _logging(self, original: "Callable[..., Any]") -> "Callable[..., Any]":
        def get_logger(manager: "Any", name: str) -> "Any":
            before = manager.loggerDict.get(name)
            logger = original(manager, name)
            if logger is not before and self._running:
                self.effects.append((self._running[-1], "logger", logger))
            return logger

        return get_logger


class _Environment(dict[bytes, bytes]):
    """The data behind `os.environ`; reports what is read and set."""

    def __init__(
        self,
        data: "dict[bytes, bytes]",
        read: "Callable[[str], None]",
        set_: "Callable[[str, str | None], None]",
    ) -> None:
        super().__init__(data)
        self._read = read
        self._set = set_

    def __getitem__(self, name: bytes) -> bytes:
        self._read(os.fsdecode(name))
        return super().__getitem__(name)

    def __setitem__(self, name: bytes, value: bytes) -> None:
        super().__setitem__(name, value)
        self._set(os.fsdecode(name), os.fsdecode(value))

    def __delitem__(self, name: bytes) -> None:
        super().__delitem__(name)
        self._set(os.fsdecode(name), None)

    def __iter__(self) -> "Iterator[bytes]":
        self._read(EVERYTHING)
        return super().__iter__()


def _absolute(name: str, globals_: "Any", level: int) -> str:
    if not level:
        return name
    package = (globals_ or {}).get("__package__") or (globals_ or {}).get("__name__", "")
    parts = package.rsplit(".", level - 1)
    return f"{parts[0]}.{name}" if name else parts[0]
