"""Checks of the training script: reads its source, and executes none of it."""

from __future__ import annotations

import ast
from collections.abc import Iterator

from elastic_agent.python_source import parsed, problem_with_source

from .findings import Finding, error, warning
from .request import Request

LONGEST_SOURCE = 4 * 2**20


def check_script(request: Request) -> Iterator[Finding]:
    """Check that the script can be started and compiles, and leaves the address of the process group to the agent."""
    if request.script_problem is not None:
        problem, remedy = request.script_problem
        yield error("script", problem, remedy or "copy the script to the same path on all machines")
    elif request.source is not None:
        with open(request.source, "rb") as file:
            source = file.read(LONGEST_SOURCE)
        yield from check_source(source, request.source.name)


def check_source(source: bytes, name: str) -> Iterator[Finding]:
    """Check that the script compiles, and leaves the address of the process group to the agent."""
    if problem := problem_with_source(source):
        yield error(
            "script",
            f"{name} does not compile: {problem}",
            "correct it, or pass the interpreter it was written for as --python-exec",
        )
    yield from check_addresses(source, name)


def check_addresses(source: bytes, name: str) -> Iterator[Finding]:
    """Check that the script leaves the address of the process group to the agent."""
    for line_number, variable, value in _assigned_addresses(parsed(source)):
        is_loopback = value in ("localhost", "127.0.0.1", "::1")
        make = error if is_loopback else warning
        why = (
            "so every machine waits for itself" if is_loopback else "which the agent sets for each generation"
        )
        shown = f"{variable}={value}" if value else variable
        yield make(
            "script-master-address",
            f"{name}:{line_number} sets {shown}, {why}",
            "remove that line, or use os.environ.setdefault",
        )


def _assigned_addresses(tree: ast.AST) -> Iterator[tuple[int, str, str]]:
    """Yield line, variable and value (if it is a constant) of each assignment of MASTER_ADDR or MASTER_PORT.

    What an ``if`` guards by what is in the environment is left out. Without recursion: source may be nested deeply.
    """
    pending = [tree]
    while pending:
        match pending.pop():
            case ast.If(test=test) if any(_is_environ(node) for node in ast.walk(test)):
                continue
            case (
                ast.Assign(
                    targets=[
                        ast.Subscript(value=target, slice=ast.Constant("MASTER_ADDR" | "MASTER_PORT" as name))
                    ],
                    value=value,
                ) as assignment
            ) if _is_environ(target):
                yield assignment.lineno, name, str(value.value) if isinstance(value, ast.Constant) else ""
            case node:
                pending += reversed([*ast.iter_child_nodes(node)])


def _is_environ(node: ast.AST) -> bool:
    """Return whether this is ``os.environ``, or ``environ`` of a module or by itself."""
    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False
