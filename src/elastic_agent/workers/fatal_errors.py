"""Reads the stacks that `faulthandler` writes to stderr when a signal such as SIGSEGV or SIGABRT ends a worker.

Pure. The workers of Python programs have `faulthandler` enabled, so that a crash in native code, gloo's abort included,
can be attributed to a line of the script.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from itertools import takewhile

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
_FRAME = re.compile(r'^  File "(?P<path>[^"]*)", line (?P<line>\d+) in (?P<function>.*)$')
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
        elif (frame := _FRAME.match(line)) is not None:
            thread.append(f'  File "{frame["path"]}", line {frame["line"]}, in {frame["function"]}')
    innermost_first = current or (threads[-1] if threads else [])  # the main thread is written last
    own = takewhile(lambda frame: not any(path in frame for path in _STARTS_WORKERS), innermost_first)
    return tuple(reversed(list(own)))
