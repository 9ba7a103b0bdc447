"""Finds where Python source changes environment variables of its own process; nothing is executed."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass


@dataclass(frozen=True)
class EnvironmentChange:
    """An environment variable is set or removed; value None: not known from the source."""

    name: str
    value: str | None
    line: int
    if_missing: bool = False
    removed: bool = False


def changes_of(node: ast.AST) -> Iterator[EnvironmentChange]:
    """Yield what this statement or call changes by itself, in its order; what is nested in it is left out."""
    match node:
        case ast.Assign(targets=targets, value=value):
            for target in targets:
                yield from _item(target, value)
        case ast.AnnAssign(target=target, value=ast.expr() as value):
            yield from _item(target, value)
        case ast.AugAssign(target=target, value=value):
            yield from _all(value) if is_environ(target) else _item(target, None)
        case ast.Delete(targets=targets):
            for target in targets:
                yield from _item(target, None, removed=True)
        case ast.Call(func=ast.Attribute(value=of, attr=method), args=arguments, keywords=keywords):
            if is_environ(of) or method in ("putenv", "unsetenv"):
                yield from _called(method, arguments, keywords)


def is_environ(node: ast.AST) -> bool:
    """Return whether this is ``os.environ``, or ``environ`` of a module or by itself."""
    match node:
        case ast.Attribute(attr="environ") | ast.Name(id="environ"):
            return True
    return False


def _called(
    method: str, arguments: list[ast.expr], keywords: list[ast.keyword]
) -> Iterator[EnvironmentChange]:
    match method, arguments:
        case "update", mappings:
            for mapping in mappings:
                yield from _all(mapping)
            yield from _named(keywords)
        case (("setdefault" | "putenv"), [key, value]):
            yield from _change(key, value, if_missing=method == "setdefault")
        case (("pop" | "unsetenv"), [key, *_]):
            yield from _change(key, None, removed=True)


def _item(target: ast.expr, value: ast.expr | None, *, removed: bool = False) -> Iterator[EnvironmentChange]:
    if isinstance(target, ast.Subscript) and is_environ(target.value):
        yield from _change(target.slice, value, removed=removed)


def _all(mapping: ast.expr) -> Iterator[EnvironmentChange]:
    match mapping:
        case ast.Dict(keys=keys, values=values):
            for key, value in zip(keys, values, strict=True):
                yield from _change(key, value)
        case ast.Call(func=ast.Name(id="dict"), keywords=keywords):
            yield from _named(keywords)


def _named(keywords: list[ast.keyword]) -> Iterator[EnvironmentChange]:
    for keyword in keywords:
        if keyword.arg is not None:
            yield EnvironmentChange(keyword.arg, _text(keyword.value), keyword.lineno)


def _change(
    key: ast.expr | None, value: ast.expr | None, *, if_missing: bool = False, removed: bool = False
) -> Iterator[EnvironmentChange]:
    if key is not None and (name := _text(key)) is not None:
        yield EnvironmentChange(name, _text(value), key.lineno, if_missing, removed)


def _text(node: ast.expr | None) -> str | None:
    return node.value if isinstance(node, ast.Constant) and isinstance(node.value, str) else None
