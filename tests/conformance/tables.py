"""Reading which cases a script has without running it."""

from __future__ import annotations

import ast
from pathlib import Path


def functions_of(path: Path, decorator: str) -> list[str]:
    """The names of the functions that carry this decorator, in order."""
    return [
        one.name
        for one in ast.parse(path.read_text()).body
        if isinstance(one, ast.FunctionDef)
        and any(isinstance(mark, ast.Name) and mark.id == decorator for mark in one.decorator_list)
    ]
