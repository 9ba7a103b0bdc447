"""Finds what a script imports, and what it does that requires a worker with a Python of its own.

Reads the source; nothing is executed.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Iterable, Iterator, Mapping
from importlib.machinery import PathFinder

from elastic_agent.agent.environment_changes import EnvironmentChange, changes_of
from elastic_agent.python_source import parsed
from elastic_agent.workers.spawner.curated import TRAIN_NOTHING, is_curated
from elastic_agent.workers.spawner.import_variables import is_read_at_import

_TITLES = "setproctitle"
_MOST_FILES = 200
_FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.Lambda)


def _has_effect(change: EnvironmentChange, environ: Mapping[str, str]) -> bool:
    """Return whether it would change, in this environment, what torch reads when it is imported."""
    set_already = environ.get(change.name)
    if change.removed:
        return set_already is not None and is_read_at_import(change.name, set_already)
    if set_already is not None and (change.if_missing or set_already == change.value):
        return False
    return is_read_at_import(change.name, change.value)


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
        for change in _changes_before_torch(tree):
            if _has_effect(change, environ):
                does, advice = ("removes", "set it as needed") if change.removed else ("sets", "set it")
                return (
                    f"{name} {does} {change.name} in line {change.line}, which torch reads when it is imported; for "
                    f"warm workers, {advice} in the agent's environment"
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
    for tree, imports in _sources(script, is_module, folder):
        trains = trains or any(map(_names_optimizers, ast.walk(tree)))
        for name, attributes, is_beside in imports:
            if is_curated(name):
                found.setdefault(name, {}).update(dict.fromkeys(attributes))
            trains = trains or not (is_beside or name.partition(".")[0] in TRAIN_NOTHING)
    if trains:
        found.setdefault("torch.optim", {})
    return tuple((name, tuple(attributes)) for name, attributes in found.items())


def imports(script: str, is_module: bool, folder: str, module: str) -> bool:
    """Return whether the script, or a file beside it that it imports, imports this module, outside of functions."""
    return any(
        module in (name, *(f"{name}.{attribute}" for attribute in attributes))
        for _, imported in _sources(script, is_module, folder)
        for name, attributes, _ in imported
    )


def _sources(
    script: str, is_module: bool, folder: str
) -> Iterator[tuple[ast.Module, list[tuple[str, tuple[str, ...], bool]]]]:
    """Yield the source of the script, and of each file beside it that it imports, with what it imports.

    That is the module, what is imported from it, and whether there are files of it beside the script.
    """
    waiting = [(file, "") for file in _files_that_run(script, is_module, folder)][:_MOST_FILES]
    if is_module:
        waiting = [(file, _package_of(file, folder)) for file, _ in waiting]
    seen = {file for file, _ in waiting}
    for file, package in waiting:
        tree, imported = _parsed(file), []
        for name, attributes in _imports_at_import(tree, package):
            files = [*_beside(folder, (name, *(f"{name}.{attribute}" for attribute in attributes)))]
            imported.append((name, attributes, bool(files)))
            for beside in files:
                if beside not in seen and len(seen) < _MOST_FILES:
                    seen.add(beside)
                    waiting.append((beside, _package_of(beside, folder)))
        yield tree, imported


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


def _changes_before_torch(tree: ast.Module) -> Iterator[EnvironmentChange]:
    """Yield the changes in the order of the source; a function that is defined before may be called before."""
    for node, in_function in _in_order(tree):
        if _imports(node, "torch") and not in_function:
            return
        yield from changes_of(node)


def _in_order(node: ast.AST, in_function: bool = False) -> Iterator[tuple[ast.AST, bool]]:
    for child in ast.iter_child_nodes(node):
        yield child, in_function
        yield from _in_order(child, in_function or isinstance(child, _FUNCTIONS))


def _imports(node: ast.AST, module: str) -> bool:
    if isinstance(node, ast.Import):
        return any(alias.name.partition(".")[0] == module for alias in node.names)
    return isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").split(".")[0] == module
