"""Finds what a script imports, and what it does that requires a worker with a Python of its own.

Reads the source; nothing is executed.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib.machinery import PathFinder

from elastic_agent.python_source import parsed
from elastic_agent.workers.spawner.curated import TRAIN_NOTHING, is_curated
from elastic_agent.workers.spawner.import_variables import is_read_at_import

_TITLES = "setproctitle"
_MOST_FILES = 200
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


@dataclass(frozen=True)
class _Change:
    """An environment variable is set or removed; value None: not known from the source."""

    name: str
    value: str | None
    line: int
    if_missing: bool = False
    removed: bool = False

    def has_effect(self, environ: Mapping[str, str]) -> bool:
        if self.removed:
            return self.name in environ and is_read_at_import(self.name, environ[self.name])
        if self.name in environ and (self.if_missing or environ[self.name] == self.value):
            return False
        return is_read_at_import(self.name, self.value)

    def why_cold(self, file: str) -> str:
        does, advice = ("removes", "set it as needed") if self.removed else ("sets", "set it")
        return (
            f"{file} {does} {self.name} in line {self.line}, which torch reads when it is imported; for warm "
            f"workers, {advice} in the agent's environment"
        )


def needs_own_python(script: str, *, is_module: bool, folder: str, environ: Mapping[str, str]) -> str | None:
    """Return why a worker that has imported torch already would not be as good; None if there is no reason.

    Args:
        script: the file or folder, or the module.
        is_module: whether it is a module.
        folder: what ``sys.path[0]`` is in the workers.
        environ: the environment in which they would have imported torch.
    """
    for file in _files_that_run(script, is_module, folder):
        tree = _parsed(file)
        name = os.path.basename(file)
        change = next((change for change in _changes_before_torch(tree) if change.has_effect(environ)), None)
        if change is not None:
            return change.why_cold(name)
        if any(_imports(node, _TITLES) for node in ast.walk(tree)):
            return f"{name} imports {_TITLES}, which has no effect in a warm worker"
    return None


def curated_imports(script: str, is_module: bool, folder: str) -> tuple[tuple[str, tuple[str, ...]], ...]:
    """Return what the script imports of curated packages, with the names that it imports from them, in its order.

    Imports inside of functions do not count. Files beside the script that it imports are read like the script. If these
    files or the packages that they import may make an optimizer, ``torch.optim`` is among the imports.
    """
    found: dict[str, dict[str, None]] = {}
    trains = False
    waiting = [(file, "") for file in _files_that_run(script, is_module, folder)][:_MOST_FILES]
    if is_module:
        waiting = [(file, _package_of(file, folder)) for file, _ in waiting]
    seen = {file for file, _ in waiting}
    for file, package in waiting:
        tree = _parsed(file)
        trains = trains or any(map(_names_optimizers, ast.walk(tree)))
        for name, attributes in _imports_at_import(tree, package):
            if is_curated(name):
                found.setdefault(name, {}).update(dict.fromkeys(attributes))
            files = [*_beside(folder, (name, *(f"{name}.{attribute}" for attribute in attributes)))]
            trains = trains or not (files or name.partition(".")[0] in TRAIN_NOTHING)
            for beside in files:
                if beside not in seen and len(seen) < _MOST_FILES:
                    seen.add(beside)
                    waiting.append((beside, _package_of(beside, folder)))
    if trains:
        found.setdefault("torch.optim", {})
    return tuple((name, tuple(attributes)) for name, attributes in found.items())


def _names_optimizers(node: ast.AST) -> bool:
    """Return whether the source mentions ``optim`` or DDP here, both of which import much of torch when used."""
    match node:
        case ast.Attribute(attr=name) | ast.alias(name=name):
            return "optim" in name.split(".") or name == "DistributedDataParallel"
        case ast.ImportFrom(module=str(name)):
            return "optim" in name.split(".")
    return False


def _parsed(file: str) -> ast.Module:
    """Return the source's tree, an empty one if there is no such source: the worker reports the error."""
    try:
        with open(file, "rb") as opened:
            return parsed(opened.read())
    except OSError:
        return ast.Module([], [])


def _imports_at_import(tree: ast.Module, package: str) -> Iterator[tuple[str, tuple[str, ...]]]:
    """Yield the absolute names of imported modules, and what is imported from them."""
    for node, in_function in _in_order(tree):
        if in_function:
            continue
        if isinstance(node, ast.Import):
            yield from ((alias.name, ()) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            around = package.split(".")[: 1 - node.level or None] if node.level else []
            name = ".".join((*around, *(node.module or "").split("."))).strip(".")
            yield name, tuple(alias.name for alias in node.names if alias.name != "*")


def _beside(folder: str, names: Iterable[str]) -> Iterator[str]:
    """Yield the files in the script's folder that an import of these modules runs."""
    for name in names:
        path = folder
        for part in name.split("."):
            path = os.path.join(path, part)
            yield from filter(os.path.isfile, (f"{path}.py", os.path.join(path, "__init__.py")))


def _package_of(file: str, folder: str) -> str:
    return os.path.relpath(os.path.dirname(file), folder).replace(os.sep, ".").strip(".")


def _files_that_run(script: str, is_module: bool, folder: str) -> Iterator[str]:
    """Yield the script itself; of a module also the packages around it, found as runpy finds them."""
    if not is_module:
        yield os.path.join(script, "__main__.py") if os.path.isdir(script) else script
        return
    path, name = [folder, *sys.path], ""
    for part in (*script.split("."), "__main__"):
        name = f"{name}.{part}" if name else part
        try:
            spec = PathFinder.find_spec(name, path)
        except (ImportError, ValueError):
            return
        if spec is not None and spec.origin is not None and spec.origin.endswith(".py"):
            yield spec.origin
        if spec is None or spec.submodule_search_locations is None:
            return
        path = [*spec.submodule_search_locations]


def _changes_before_torch(tree: ast.Module) -> Iterator[_Change]:
    """Yield the changes in the order of the source; a function that is defined before may be called before."""
    for node, in_function in _in_order(tree):
        if _imports(node, "torch") and not in_function:
            return
        yield from _changes(node)


def _in_order(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function
        yield from _in_order(child, in_function or isinstance(child, _FUNCTIONS))


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == module for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == module


def _changes(node: ast.AST) -> Iterator[_Change]:
    yield from _settings(node)
    yield from _removals(node)


def _settings(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _item_set(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _item_set(target, value)
        case ast.AugAssign(target=target, value=value):
            if _is_environ(target):
                yield from _all_set(value)
            else:
                yield from _item_set(target, None)
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=arguments, keywords=keywords):
            if _is_environ(of) and method == "update":
                for argument in arguments:
                    yield from _all_set(argument)
                yield from _all_named(keywords, node.lineno)
            elif len(arguments) == 2 and (method == "putenv" or (_is_environ(of) and method == "setdefault")):
                key, value = arguments
                yield from _set(key, value, node.lineno, if_missing=method == "setdefault")


def _removals(node: ast.AST) -> Iterator[_Change]:
    match node:
        case ast.Delete(targets=targets):
            for target in targets:
                if isinstance(target, ast.Subscript) and _is_environ(target.value):
                    yield from _removed(target.slice, target.lineno)
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=[name, *_]):
            if method == "unsetenv" or (_is_environ(of) and method == "pop"):
                yield from _removed(name, node.lineno)


def _item_set(target: ast.expr, value: ast.expr | None) -> Iterator[_Change]:
    if isinstance(target, ast.Subscript) and _is_environ(target.value):
        yield from _set(target.slice, value, target.lineno)


def _all_set(mapping: ast.expr) -> Iterator[_Change]:
    match mapping:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                if key is not None:
                    yield from _set(key, value, key.lineno)
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from _all_named(keywords, mapping.lineno)


def _all_named(keywords: list[ast.keyword], line: int) -> Iterator[_Change]:
    for keyword in keywords:
        yield from _set(ast.Constant(keyword.arg), keyword.value, line)


def _set(key: ast.expr, value: ast.expr | None, line: int, *, if_missing: bool = False) -> Iterator[_Change]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        known = value.value if isinstance(value, ast.Constant) and isinstance(value.value, str) else None
        yield _Change(key.value, known, line, if_missing)


def _removed(key: ast.expr, line: int) -> Iterator[_Change]:
    if isinstance(key, ast.Constant) and isinstance(key.value, str):
        yield _Change(key.value, None, line, removed=True)


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
