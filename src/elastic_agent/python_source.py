"""Source code of Python, as it is read without being executed."""

from __future__ import annotations

import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import ast

_TOO_DEEP = (RecursionError, MemoryError, SystemError)
"""The errors of the parser for source that is nested deeply; another process may still be able to compile it."""


def problem_with_source(source: bytes) -> str:
    """Return why it is not Python, with the line; an empty string if it may be."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # the workers show them
            compile(source, "", "exec", dont_inherit=True)
    except SyntaxError as error:
        return f"line {error.lineno}: {error.msg}" if error.lineno else error.msg
    except ValueError as error:
        return str(error)
    except _TOO_DEEP:
        return ""
    return ""


def parsed(source: bytes) -> ast.Module:
    """Return its tree; an empty one for what cannot be parsed, of which the worker reports the error."""
    import ast  # the command, which only compiles, is to answer at once

    try:
        return ast.parse(source)
    except (SyntaxError, ValueError, *_TOO_DEEP):
        return ast.Module([], [])
