"""Finds in what a worker wrote to stderr the traceback that ended its script, or the stack of its crash.

Pure. A worker may write several tracebacks: of exceptions that were caught and printed, of threads, of what runs while
Python exits. After the one that ended the script, libraries may write pages of their own. The workers of Python
programs have `faulthandler` enabled, which writes stacks when a signal such as SIGSEGV or SIGABRT ends one, so that a
crash in native code, gloo's abort included, can be attributed to a line of the script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

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


# --- crashes in native code -----------------------------------------------------------------------

_BEGIN = re.compile(r"^Fatal Python error: (.*)$", re.MULTILINE)
_SIGNALS = frozenset(
    {
        "Aborted",
        "Bus error",
        "Floating point exception",
        "Floating-point exception",
        "Illegal instruction",
        "Segmentation fault",
    }
)
"""The names that `faulthandler` gives the signals that it handles; with any other name, Python itself ended the
process."""
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):$")
_REQUESTED = re.compile(
    r"^(?:stacks of worker \S+ \(pid \d+\):|(?:Current thread|Thread) 0x[0-9a-f]+.*\(most recent call first\):"
    r'|  File "[^"\n]*", line \d+ in .*|  \.\.\.|  <.*>)(?:\n+|\Z)',
    re.MULTILINE,
)
"""The output of a worker whose stacks are requested; frames of tracebacks have a comma before their ``in``."""
_OWN = re.compile(r"^(?:Fatal Python error: |Timeout \()", re.MULTILINE)
"""The beginnings of stacks that were not requested: of a crash, or of the script's own ``dump_traceback_later``."""
_CURRENT = "Current thread "
_STACK_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
_STARTS_WORKERS = ("/elastic_agent/workers/", "/elastic_agent/__main__.py")
"""In the paths of the frames in which a warm worker runs the script."""


@dataclass(frozen=True)
class FatalError:
    """The end of a worker by a signal that `faulthandler` handled."""

    before: str
    """The output of the worker to stderr before."""
    stack: tuple[str, ...]
    """The frames of the thread that crashed, as in a traceback, the innermost last; those of the main thread if the
    thread that crashed runs no Python code, such as gloo's."""

    def with_stack(self, message: str) -> str:
        """Return the message under its stack, in the layout of a traceback."""
        head = "Fatal Python error (most recent call last):"
        return "\n".join((head, *self.stack, message)) if self.stack else message


def without_requested_stacks(stderr: str) -> str:
    """Return a worker's output without the stacks that the agent or ``elastic-agent stacks`` had it write."""
    own = _OWN.search(stderr)
    end = own.start() if own is not None else len(stderr)
    return _REQUESTED.sub("", stderr[:end]) + stderr[end:]


def last_fatal_error(stderr: str) -> FatalError | None:
    """Return the last fatal error in a worker's output, None if there is none.

    A process that the worker forked may have written one, too: the worker's own is the last.
    """
    found = None
    for begin in _BEGIN.finditer(stderr):
        if begin[1] in _SIGNALS:
            found = begin
    if found is None:
        return None
    return FatalError(stderr[: found.start()], _stack(stderr[found.end() :].splitlines()))


def _stack(lines: list[str]) -> tuple[str, ...]:
    threads: list[list[str]] = []
    current: list[str] = []
    thread: list[str] = []
    for line in lines:
        if _THREAD.match(line):
            thread = []
            threads.append(thread)
            if line.startswith(_CURRENT):
                current = thread
        elif (frame := _STACK_FRAME.match(line)) is not None:
            thread.append(f'  File "{frame["path"]}", line {frame["line"]}, in {frame["function"]}')
    innermost_first = current or (threads[-1] if threads else [])  # the main thread is written last
    own = takewhile(lambda frame: not any(path in frame for path in _STARTS_WORKERS), innermost_first)
    return tuple(reversed(list(own)))
