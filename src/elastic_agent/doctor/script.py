"""Checks of the training script: reads its source, and asks the interpreter for its imports. Executes none of it."""

from __future__ import annotations

import ast
import os
import shutil
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder

from elastic_agent.printable import escaped
from elastic_agent.python_source import parsed, problem_with_source

from .findings import Finding, error, warning
from .interpreter import Installed
from .request import Request

LONGEST_SOURCE = 4 * 2**20


def read_source(request: Request) -> bytes | Finding | None:
    """The script's source, or what is wrong with it; None: it is not a Python file, or there is no script."""
    if request.script_problem:
        return error(
            "script",
            request.script_problem,
            "copy the script to the same path on all machines, or pass a path on storage that they share",
        )
    if not request.script:
        return None
    if request.is_program:
        if shutil.which(request.script) is None:
            return error("script", f"{_shown(request)} is not an executable program", "check the path")
        return None
    path = _module_file(request.script) if request.is_module else request.script
    if path is None or os.path.isdir(path):
        return None
    try:
        with open(path, "rb") as file:
            return file.read(LONGEST_SOURCE)
    except OSError as failure:
        return error(
            "script",
            f"the script {_shown(request)} cannot be read on this machine: {failure.strerror}",
            "copy it to the same path on all machines, or pass a path on storage that they share",
        )


def _module_file(name: str) -> str | None:
    """The file of a top-level module of the working directory; others are found by the interpreter."""
    spec = PathFinder.find_spec(name.partition(".")[0], [os.getcwd()])
    return spec.origin if spec is not None and "." not in name else None


def _shown(request: Request) -> str:
    return escaped(request.script)


def check_source(source: bytes, name: str) -> Iterator[Finding]:
    """The script compiles, and leaves rank and address of the process group to the agent."""
    if problem := problem_with_source(source):
        yield error(
            "script",
            f"{name} does not compile: {problem}",
            "correct it, or pass the interpreter it was written for as --python-exec",
        )
        return
    tree = parsed(source)
    for variable, line_number, value in _assigned_variables(tree):
        if variable in ("MASTER_ADDR", "MASTER_PORT"):
            is_loopback = value in ("localhost", "127.0.0.1", "::1")
            make = error if is_loopback else warning
            why = (
                "so every machine waits for itself"
                if is_loopback
                else "which the agent sets for each generation"
            )
            shown = f"{variable}={value}" if value else variable
            yield make(
                "script-master-address",
                f"{name}:{line_number} sets {shown}, {why}",
                "remove that line, or use os.environ.setdefault",
            )
    for line_number in _local_ranks_as_rank(tree):
        yield error(
            "script-rank",
            f"{name}:{line_number} passes LOCAL_RANK as rank: workers of different machines get the same rank",
            "use RANK, or call init_process_group() without rank and world_size",
        )


def _assigned_variables(tree: ast.AST) -> Iterator[tuple[str, int, str]]:
    """Environment variables that the source assigns, unless they are set: name, line, value if it is a constant."""
    for node in _unconditional(tree):
        if not isinstance(node, ast.Assign):
            continue
        for target in node.targets:
            if isinstance(target, ast.Subscript) and _dotted(target.value) in ("os.environ", "environ"):
                name, value = _constant(target.slice), _constant(node.value)
                if name:
                    yield name, node.lineno, value


def _unconditional(tree: ast.AST) -> Iterator[ast.AST]:
    """All nodes but those that an ``if`` guards by what is in the environment; without recursion, however deep."""
    left = [tree]
    while left:
        node = left.pop()
        yield node
        left += [
            child
            for child in reversed([*ast.iter_child_nodes(node)])
            if not (isinstance(child, ast.If) and _reads_environment(child.test))
        ]


def _reads_environment(node: ast.AST) -> bool:
    return any(_last_name(one) == "environ" for one in ast.walk(node))


def _dotted(node: ast.AST) -> str:
    """A name such as ``os.environ``; empty for other expressions."""
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    return ".".join(reversed([*names, node.id])) if isinstance(node, ast.Name) else ""


def _last_name(node: ast.AST) -> str:
    if isinstance(node, ast.Attribute):
        return node.attr
    return node.id if isinstance(node, ast.Name) else ""


def _constant(node: ast.AST) -> str:
    return str(node.value) if isinstance(node, ast.Constant) else ""


def _local_ranks_as_rank(tree: ast.AST) -> Iterator[int]:
    """Lines of calls of ``init_process_group`` whose rank is read from ``LOCAL_RANK``."""
    local = {
        target.id
        for node in ast.walk(tree)
        if isinstance(node, ast.Assign) and _reads_local_rank(node.value)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _last_name(node.func).endswith("init_process_group"):
            for keyword in node.keywords:
                names = {one.id for one in ast.walk(keyword.value) if isinstance(one, ast.Name)}
                if keyword.arg == "rank" and (names & local or _reads_local_rank(keyword.value)):
                    yield node.lineno


def _reads_local_rank(node: ast.AST) -> bool:
    return any(_constant(one) == "LOCAL_RANK" for one in ast.walk(node))


def top_level_imports(source: bytes) -> list[str]:
    """The modules that the script cannot do without: those imported at its top level, outside ``try`` and ``if``."""
    names: list[str] = []
    for node in parsed(source).body:
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            names.append(node.module)
    first = dict.fromkeys(name.partition(".")[0] for name in names)
    return [name for name in first if name not in sys.builtin_module_names]


def check_imports(installed: Installed, request: Request) -> Iterator[Finding]:
    """The interpreter finds every module that the script imports."""
    if installed.problem:
        where = " at the same path on all machines" if request.most > 1 else ""
        yield error(
            "interpreter",
            f"the interpreter {escaped(request.python)} cannot be started: {installed.problem}",
            f"install it{where}, or pass another --python-exec",
        )
    if installed.missing:
        yield error(
            "imports",
            f"{_shown(request)} imports {', '.join(installed.missing)}, which {escaped(request.python)} does not find",
            "install it in that environment, or pass the right interpreter as --python-exec",
        )
