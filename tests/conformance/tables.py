"""Reading which items and cases a script has without running it."""

from __future__ import annotations

import ast
from pathlib import Path


def keys_of(path: Path, *tables: str) -> list[str]:
    """The keys of these module-level dictionaries, in order."""
    found = []
    for statement in ast.parse(path.read_text()).body:
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Dict):
            names = {one.id for one in statement.targets if isinstance(one, ast.Name)}
            if names & set(tables):
                found += [ast.literal_eval(key) for key in statement.value.keys if key is not None]
    return found


def functions_of(path: Path, decorator: str) -> list[str]:
    """The names of the functions that carry this decorator, in order."""
    return [
        one.name
        for one in ast.parse(path.read_text()).body
        if isinstance(one, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == decorator for mark in one.decorator_list)
    ]


def names_in(path: Path, table: str) -> list[str]:
    """The names in this module-level tuple, in order."""
    return [
        name.id
        for statement in ast.parse(path.read_text()).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Tuple)
        if any(isinstance(target, ast.Name) and target.id == table for target in statement.targets)
        for name in statement.value.elts
        if isinstance(name, ast.Name)
    ]
