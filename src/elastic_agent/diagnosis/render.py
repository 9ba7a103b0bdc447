"""A root cause as plain text of at most 17 lines, the first of which names cause, machine and worker. Pure."""

from __future__ import annotations

import itertools
import re
import textwrap
from collections.abc import Iterable

from .cause import CauseKind, RootCause
from .known_errors import readable

MOST_LINES = 17
"""So that it is on a screen of 20 lines with what is logged after it."""
_TAIL_LINES = 8
_WIDTH = 110
_ITEM_LINES = 3
_FRAME = '  File "'
_INSTALLED = ("/site-packages/", "/dist-packages/", "/lib/python3", "<frozen ")
_TRACEBACKS = (
    "Traceback (most recent call last)",
    "Fatal Python error",
    "SyntaxError: ",
    "IndentationError: ",
)
_MESSAGE_CHARACTERS = 300
_NEVER_THE_SAME = re.compile(r"0x[0-9a-fA-F]+|\d{4,}")
_VERBS = ("was ", "exited ", "ended", "did ", "called ", "made ")


def headline(cause: RootCause) -> str:
    """Return cause, machine and worker in one line."""
    return f"{'root cause' if cause.is_certain else 'probable root cause'}: {described(cause)}"


def described(cause: RootCause) -> str:
    """Return who failed and how, such as ``worker a/0 exited with code 1`` or ``node b was lost (host1)``."""
    who = _who(cause)
    what = _cut(cause.what, _MESSAGE_CHARACTERS)
    if not who:
        return f"{what} on {cause.host}" if cause.host and cause.host not in what else what
    if cause.kind is CauseKind.NODE_LOST:
        return f"{what} ({cause.host})" if cause.host and cause.host not in what else what
    named = (who, cause.node_id, f"worker {cause.node_id}")
    if what.startswith(named) or f"worker {cause.worker} " in what:
        machine = f" (on {cause.host})" if cause.host and cause.host not in what else ""
        return f"{what}{machine}{_folded(cause)}"
    return f"{who}{'' if what.startswith(_VERBS) else ':'} {what}{_folded(cause)}"


def render(cause: RootCause) -> str:
    """Return the report, without the generation."""
    lines = [headline(cause)]
    lines += _item("meaning", cause.meaning)
    lines += _item("remedy", cause.remedy)
    lines += _item("next", cause.next_step)
    for number, other in enumerate(cause.others):
        lines += _item("others" if not number else "", other)
    room = min(_TAIL_LINES, MOST_LINES - len(lines) - 1)
    tail = own_frames(cause.tail, room)
    if tail and room > 1:
        of = f" of worker {cause.tail_of}" if cause.tail_of else ""
        kind = "traceback" if any(mark in cause.tail for mark in _TRACEBACKS) else "last output"
        lines += [f"  {kind}{of}:", *(_cut(f"    {_short(line)}", _WIDTH) for line in tail)]
    return "\n".join(lines[:MOST_LINES])


def folded(causes: Iterable[tuple[int, str]]) -> list[str]:
    """Return reports, oldest first, with those of consecutive generations that failed in the same way as one.

    Args:
        causes: the number of each generation that failed, and its report as :func:`render` makes it.
    """
    groups: list[tuple[int, int, str]] = []
    for number, text in causes:
        first, last, before = groups[-1] if groups else (0, 0, "")
        if groups and last == number - 1 and _key(before) == _key(text):
            groups[-1] = (first, number, text)
        else:
            groups.append((number, number, text))
    return [
        f"generation {last}: {text}" if first == last else f"generations {first} to {last}: {text}"
        for first, last, text in groups
    ]


def _key(text: str) -> str:
    """Return a text that is the same for the same failure: the first line, without ports and addresses."""
    return _NEVER_THE_SAME.sub("#", text.partition("\n")[0])


def own_frames(tail: str, most_lines: int) -> list[str]:
    """Return the end of a traceback with the script's own frames, as far as they fit; the error is its last line."""
    lines = [line for line in tail.splitlines() if line.strip() and not set(line.strip()) <= {"^", "~"}]
    kept: list[str] = []
    skipping = False
    for line in lines:
        if line.startswith(_FRAME):
            skipping = any(part in line for part in _INSTALLED)
        elif not line.startswith("    "):
            skipping = False
        if not skipping:
            kept.append(line)
    return _whole_frames(kept[-most_lines:]) if most_lines > 0 else []


def _whole_frames(lines: list[str]) -> list[str]:
    """Drop the source line of a frame that was cut off."""
    if not any(line.startswith(_FRAME) for line in lines):
        return lines
    return list(itertools.dropwhile(lambda line: line.startswith("    "), lines))


def _who(cause: RootCause) -> str:
    if not cause.node_id:
        return ""
    rank = f" (rank {cause.rank})" if cause.rank is not None else ""
    who = f"worker {cause.worker}{rank}" if cause.slot is not None else f"node {cause.node_id}"
    return f"{who} on {cause.host}" if cause.host and cause.host != cause.node_id else who


def _short(line: str) -> str:
    """Shorten a line of a tail: an error, by what would leave no room for its message."""
    return line if line.startswith(" ") else readable(line)


def _cut(text: str, length: int) -> str:
    return text if len(text) <= length else f"{text[: length - 1]}…"


def _folded(cause: RootCause) -> str:
    """Return where in the script, and on which workers, in parentheses."""
    at = f"at {cause.line}" if cause.line and cause.line not in cause.what else ""
    places = ", ".join(filter(None, (at, cause.where)))
    return f" ({places})" if places else ""


def _item(name: str, text: str) -> list[str]:
    if not text:
        return []
    head = f"  {name + ':':<9}" if name else " " * 11
    return textwrap.wrap(
        text,
        _WIDTH,
        initial_indent=head,
        subsequent_indent=" " * 11,
        break_long_words=False,
        break_on_hyphens=False,
        max_lines=_ITEM_LINES,
        placeholder=" …",
    )
