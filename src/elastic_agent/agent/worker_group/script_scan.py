"""Finds what a script imports, and what it does that requires a worker with a Python of its own.

Reads the source; nothing is executed.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder

from elastic_agent.python_source import parsed
from elastic_agent.workers.spawner.curated import TRAIN_NOTHING, is_curated
from elastic_agent.workers.spawner.import_variables import is_read_at_import

_TITLES = "setproctitle"
_MOST_FILES = 200
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def needs_own_python(script: str, *, is_module: bool, folder: str, environ: Mapping[str, str]) -> str | None:
    """Return why a worker that has imported torch already would not be as good; None if there is no reason.

    Args:
        script: the file or folder, or the module.
        is_module: whether it is a module.
        folder: what ``sys.path[0]`` is in the workers.
        environ: the environment in which they would have imported torch.
    """
    for file in _files_that_run(script, is_module, folder):
        tree, name = _parsed(file), os.path.basename(file)
        change = next(_changes_before_torch(tree, environ), None)
        if change is not None:
            variable, line, is_removed = change
            does, advice = ("removes", "set it as needed") if is_removed else ("sets", "set it")
            return (
                f"{name} {does} {variable} in line {line}, which torch reads when it is imported; for warm workers, "
                f"{advice} in the agent's environment"
            )
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


_Change = tuple[str, int, bool]
"""A variable, the line in which it is changed, and whether it is removed there."""


def _changes_before_torch(tree: ast.Module, environ: Mapping[str, str]) -> Iterator[_Change]:
    """Yield what has an effect, in the order of the source; a function that is defined before may be called before."""
    for node, in_function in _in_order(tree):
        if _imports(node, "torch") and not in_function:
            return
        yield from _changes(node, environ)


def _changes(node: ast.AST, environ: Mapping[str, str]) -> Iterator[_Change]:
    """Yield the variables that this statement or call changes and that torch has read before, if it was imported."""
    names, values, how = _names_and_values(node)
    texts = {value for value, _ in values}
    for name, line in names:
        known = environ.get(name)
        if how == "remove":
            if known is not None and is_read_at_import(name, known):
                yield name, line, True
        elif known is not None and (how == "setdefault" or known in texts):
            continue
        elif any(is_read_at_import(name, text) for text in texts - {name} or [None]):
            yield name, line, False


_Texts = list[tuple[str, int]]


def _names_and_values(node: ast.AST) -> tuple[_Texts, _Texts, str]:
    """Return the names of variables that may be changed here, the values that they may get, each with its line, and how
    that is done.

    All strings of the statement are taken for either: which belong together does not matter for the result.
    """
    match node:
        case ast.Delete(targets=targets):
            return _strings([target for target in targets if _is_item(target)]), [], "remove"
        case ast.Assign(targets=targets, value=value):
            return _strings([target for target in targets if _is_item(target)]), _strings([value]), "set"
        case ast.AnnAssign(target=target, value=ast.expr() as value) if _is_item(target):
            return _strings([target]), _strings([value]), "set"
        case ast.AugAssign(target=target, value=value) if _is_item(target) or _is_environ(target):
            texts = _strings([value])
            return _strings([target]) or texts, texts, "set"
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=arguments):
            if method in ("putenv", "unsetenv") or (_is_environ(of) and method in _METHODS):
                texts = _strings([*arguments, *node.keywords])
                is_removal = method in ("unsetenv", "pop")
                return (texts[:1], [], "remove") if is_removal else (texts, texts, method)
    return [], [], ""


_METHODS = ("update", "setdefault", "pop")


def _strings(nodes: Iterable[ast.AST]) -> _Texts:
    """Return the strings in these parts of the source, and the names of keyword arguments."""
    found = []
    for node in (inner for part in nodes for inner in ast.walk(part)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            found.append((node.value, node.lineno))
        elif isinstance(node, ast.keyword) and node.arg is not None:
            found.append((node.arg, node.lineno))
    return found


def _is_item(node: ast.expr) -> bool:
    return isinstance(node, ast.Subscript) and _is_environ(node.value)


def _in_order(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function
        yield from _in_order(child, in_function or isinstance(child, _FUNCTIONS))


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == module for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == module


def _is_environ(node: ast.expr) -> bool:
    return (isinstance(node, ast.Attribute) and node.attr == "environ") or (
        isinstance(node, ast.Name) and node.id == "environ"
    )
