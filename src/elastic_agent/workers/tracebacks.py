"""Finds the traceback that ended a script in what its worker wrote to stderr, and shortens it.

Pure. A worker may write several: of exceptions that were caught and printed, of threads, of what runs while Python
exits. After the one that ended the script, libraries may write pages of their own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

_FIRST_LINE = "Traceback (most recent call last):"
_LINKS = ("During handling of the above ", "The above exception was the direct cause ")
"""The beginning of the line between an exception and the one that it led to."""
_NOT_THE_SCRIPTS = re.compile(
    r"Exception ignored |Error in atexit|Error in sys\.excepthook|Exception in thread |Process [\w-]+:$"
    r"|--- Logging error ---"
)
"""Lines before the traceback of an exception that ended something else."""
_EXCEPTION = re.compile(r"[A-Za-z_][\w.]*(: |:?$)")
_MESSAGE_LINES = 40
"""The number of lines of an exception's message that are kept."""
_INSTALLED = re.compile(r'^ *File "(?:[^"\n]*/)?(?:site-packages|dist-packages|lib/python3[^/"\n]*)/')
_FRAME = re.compile(r'^ *File "')
_PLACE = re.compile(r'^ *File "(?:[^"\n]*/)?([^"/<\n][^"/\n]*)", line (\d+)')
_ELIDED = "  [frames in installed packages]"


@dataclass(frozen=True)
class Traceback:
    """The traceback of the exception that ended a script."""

    error: str
    """The exception and the first line of its message, such as ``ValueError: bad``."""
    text: str
    """With the exceptions that led to it, and its whole message."""
    rest: tuple[str, ...] = ()
    """The lines after the first of its message. Its end cannot be told from what is written next."""


def last_of_script(stderr: str) -> Traceback | None:
    """Return the traceback that ended the script, without prefixes such as ranks; None if there is none."""
    lines = stderr.splitlines()
    starts = [number for number, line in enumerate(lines) if line == _FIRST_LINE]
    chains: list[list[int]] = []
    for number in starts:
        if chains and _line_before(lines, number).startswith(_LINKS):
            chains[-1].append(number)
        else:
            chains.append([number])
    own = [chain for chain in chains if not _NOT_THE_SCRIPTS.match(_line_before(lines, chain[0]))]
    for chain in reversed(own or chains):
        error_at = _error_after(lines, chain[-1])
        if error_at is not None:
            end = _end_of_message(lines, error_at, [start for start in starts if start > error_at])
            rest = tuple(lines[error_at + 1 : end])
            return Traceback(lines[error_at], "\n".join(lines[chain[0] : end]), rest)
    return None


def _line_before(lines: list[str], number: int) -> str:
    """Return the last line before this one that is not empty."""
    return next((line for line in reversed(lines[:number]) if line.strip()), "")


def _error_after(lines: list[str], start: int) -> int | None:
    """Return where the exception is after the frames of a traceback."""
    for number in range(start + 1, len(lines)):
        if not lines[number].startswith(" "):
            return number if _EXCEPTION.match(lines[number]) else None
    return None


def _end_of_message(lines: list[str], error_at: int, later: list[int]) -> int:
    end = min([error_at + 1 + _MESSAGE_LINES, len(lines), *later])
    rest = range(error_at + 1, end)
    ends = (number for number in rest if not lines[number].strip() or _NOT_THE_SCRIPTS.match(lines[number]))
    return next(ends, end)


def shortened(text: str, most_bytes: int) -> str:
    """Return a traceback without the frames of installed packages, if it is too long with them."""
    if len(text.encode(errors="replace")) <= most_bytes:
        return text
    kept: list[str] = []
    in_installed = False
    for line in text.splitlines():
        if _FRAME.match(line):
            in_installed = bool(_INSTALLED.match(line))
        elif not line.startswith("    "):
            in_installed = False
        if not in_installed:
            kept.append(line)
        elif kept[-1:] != [_ELIDED]:
            kept.append(_ELIDED)
    return "\n".join(kept)


def script_line(text: str) -> str:
    """Return the innermost line of the script in a traceback, such as ``train.py:88``; empty if there is none."""
    for line in reversed(text.splitlines()):
        place = _PLACE.match(line)
        if place is not None and not _INSTALLED.match(line):
            return f"{place[1]}:{place[2]}"
    return ""
