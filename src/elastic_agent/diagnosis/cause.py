"""The root cause of a failure: what ended a generation, where, and what to do about it; and its text. Pure."""

from __future__ import annotations

import enum
import itertools
import re
import textwrap
from collections.abc import Iterable

from msgspec import Struct

from elastic_agent.printable import cut

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
VERBS = ("was ", "exited ", "ended", "did ", "called ", "made ")
"""The beginnings of what follows the name of a worker without a colon."""


class CauseKind(enum.StrEnum):
    """The kind of failure that ended a generation."""

    EXCEPTION = "exception"
    """The script of a worker raised an exception."""
    EXIT_CODE = "exit-code"
    """A worker exited with a code other than 0, and wrote no exception."""
    SIGNAL = "signal"
    """A signal that no agent sent killed a worker."""
    OUT_OF_MEMORY = "out-of-memory"
    """The kernel killed a worker, or one of its processes, because the memory was used up."""
    START = "start"
    """The workers of a node could not be started, or could not reach the bootstrap store."""
    EARLY_EXIT = "early-exit"
    """A worker exited with 0 while others still needed it."""
    HANG = "hang"
    """A worker stopped making progress."""
    NODE_LOST = "node-lost"
    """A node stopped taking part: its machine, its agent or its network failed."""
    NETWORK = "network"
    """A connection between workers broke or could not be made, although all workers were alive."""
    UNKNOWN = "unknown"
    """No report but of consequences."""


class RootCause(Struct, frozen=True, omit_defaults=True):
    """The first failure in a generation, by causality. All texts are single lines, `tail` excepted."""

    generation: int
    kind: CauseKind
    what: str
    """The failure in words, such as ``ValueError: bad batch`` or ``killed by SIGKILL``."""
    node_id: str = ""
    """Empty: not known."""
    host: str = ""
    """The machine's name or address."""
    slot: int | None = None
    """The worker's number on its node; None: the node as a whole, or not known."""
    rank: int | None = None
    where: str = ""
    """The workers with the same error, such as ``on 6 of 6 workers`` or ``only on host1``."""
    line: str = ""
    """Where it happened in the script, such as ``train.py:88``; empty: not known, or `what` says so."""
    meaning: str = ""
    """The meaning of the error, if it is a known one."""
    remedy: str = ""
    """The change that helps, if it is known."""
    next_step: str = ""
    """Where to look further."""
    others: tuple[str, ...] = ()
    """Lines about the other workers, most important first."""
    tail: str = ""
    """The end of the traceback, or of what the worker wrote to stderr."""
    tail_of: str = ""
    """The worker whose tail it is, if another one."""
    is_certain: bool = True
    """The observations show it; otherwise it is the most likely explanation."""

    @property
    def worker(self) -> str:
        """The worker's id, such as ``n2/0``; the node's id where no single worker is the cause; empty: unknown."""
        return self.node_id if self.slot is None or not self.node_id else f"{self.node_id}/{self.slot}"


def headline(cause: RootCause) -> str:
    """Return cause, machine and worker in one line."""
    return f"{'root cause' if cause.is_certain else 'probable root cause'}: {described(cause)}"


def described(cause: RootCause) -> str:
    """Return who failed and how, such as ``worker a/0 exited with code 1`` or ``node b was lost (host1)``."""
    who = _who(cause)
    what = cut(cause.what, _MESSAGE_CHARACTERS)
    if not who:
        return f"{what} on {cause.host}" if cause.host and cause.host not in what else what
    if cause.kind is CauseKind.NODE_LOST:
        return f"{what} ({cause.host})" if cause.host and cause.host not in what else what
    named = (who, cause.node_id, f"worker {cause.node_id}")
    if what.startswith(named) or f"worker {cause.worker} " in what:
        machine = f" (on {cause.host})" if cause.host and cause.host not in what else ""
        return f"{what}{machine}{_folded(cause)}"
    return f"{who}{'' if what.startswith(VERBS) else ':'} {what}{_folded(cause)}"


def render(cause: RootCause) -> str:
    """Return the report, without the generation."""
    lines = [headline(cause)]
    lines += _item("meaning", cause.meaning)
    lines += _item("remedy", cause.remedy)
    lines += _item("next", cause.next_step)
    for number, other in enumerate(cause.others):
        lines += _item("others" if not number else "", other)
    room = min(_TAIL_LINES, MOST_LINES - len(lines) - 1)
    tail = _own_frames(cause.tail, room)
    if tail and room > 1:
        of = f" of worker {cause.tail_of}" if cause.tail_of else ""
        kind = "traceback" if any(mark in cause.tail for mark in _TRACEBACKS) else "last output"
        # An error is shortened by what would leave no room for its message.
        shown = (line if line.startswith(" ") else readable(line) for line in tail)
        lines += [f"  {kind}{of}:", *(cut(f"    {line}", _WIDTH) for line in shown)]
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


def _own_frames(tail: str, most_lines: int) -> list[str]:
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
    last = kept[-most_lines:] if most_lines > 0 else []
    if not any(line.startswith(_FRAME) for line in last):
        return last
    # Without the rest of a frame that was cut off.
    return list(itertools.dropwhile(lambda line: line.startswith("    "), last))


def _who(cause: RootCause) -> str:
    if not cause.node_id:
        return ""
    rank = f" (rank {cause.rank})" if cause.rank is not None else ""
    who = f"worker {cause.worker}{rank}" if cause.slot is not None else f"node {cause.node_id}"
    return f"{who} on {cause.host}" if cause.host and cause.host != cause.node_id else who


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
