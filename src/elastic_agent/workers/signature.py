"""Determines whether two failures are the same error at the same line, so that a restart is of no use.

Pure. A failure that another attempt may well cure has no signature: errors of memory, devices, collectives,
connections and time-outs. Most of those are besides the mere consequence of what happened to another worker. Tensors
of different sizes in one collective are an error of the script, although gloo reports them by SIGABRT.
"""

from __future__ import annotations

import hashlib
import re

_TRACEBACK = "Traceback (most recent call last):"
_COMPARED = 400
"""Characters of two errors that are compared; the longest are cut."""
_SIGNALLED = 128
"""Shells add the signal's number to this when they exit for a child that was killed."""
_NEVER_THE_SAME = re.compile(r"0x[0-9a-fA-F]+|\d+")
"""Addresses, pids, ranks, ports and the like."""
_PLACE = re.compile(r'^ *File "(?:[^"\n]*/)?([^"/\n]*)", line (\d+)(?:, in (.*))?$', re.MULTILINE)
_ERROR = re.compile(r"^([A-Za-z_][\w.]*)(?:: .*|:?)$", re.MULTILINE)
_MISTAKES = frozenset(
    {
        "AttributeError",
        "FileNotFoundError",
        "ImportError",
        "IndentationError",
        "IndexError",
        "KeyError",
        "ModuleNotFoundError",
        "NameError",
        "NotImplementedError",
        "SyntaxError",
        "TypeError",
        "UnboundLocalError",
    }
)
"""These are errors in the script, with any message."""
_MAY_PASS = re.compile(
    r"""
    memory | allocat | \bcu(?:da|dnn|blas|fft) | \bhip\b | [nr]ccl | gloo | accelerator | \bgpu | \bibv | infiniband
    | \bdist(?:backend|network|store)?error | connect | peer\b | socket | network | resol(?:ve|ution)
    | \bname\ or\ service | time[sd]?[ -]?out | timeout | deadline | unavailable | temporar | try\ again | retr(?:y|ies)
    | pipe\b | \bhttp | \bssl | \burl | in\ use | \bbusy | interrupt | too\ many | quota | throttl
    | rate\ limit | \bstale | input/output | i/o
    | no\ space | eoferror | \boserror | ioerror | terminated | killed | aborted | unexpectedly | \block
    """,
    re.IGNORECASE | re.VERBOSE,
)


def signature(returncode: int, message: str, trace: str, is_lasting: bool = False) -> str:
    """Return the same text for the same error; "" where another attempt may cure it, or nothing is known of it.

    Args:
        returncode: how the worker ended; negative for a signal.
        message: the error in one line.
        trace: its traceback, or the end of what the worker wrote to stderr.
        is_lasting: it is known that another attempt does not cure this error, whatever its words.
    """
    if not message or returncode < 0 or returncode > _SIGNALLED:
        return ""
    kind = message.partition(":")[0]
    causes = [error for error in _errors(trace) if error[:_COMPARED] != message[:_COMPARED]]
    own = [] if is_lasting or kind in _MISTAKES else [message]
    if any(_MAY_PASS.search(error) for error in (*causes, *own)):
        return ""
    places = _PLACE.findall(trace)
    text = _NEVER_THE_SAME.sub("#", message)
    return _digest(str(returncode), text, *(places[-1] if places else ()))


def signature_at(message: str, line: str) -> str:
    """Return the signature of an error of which another attempt is known not to cure it; "" if the line is not known.

    Args:
        message: the error, or its name.
        line: of the script, such as ``train.py:88``.
    """
    return _digest(_NEVER_THE_SAME.sub("#", message), line) if line else ""


def _digest(*parts: str) -> str:
    return hashlib.blake2b("\n".join(parts).encode(errors="replace"), digest_size=8).hexdigest()


def _errors(trace: str) -> list[str]:
    """Return what each traceback ends with: of a chain, the causes first."""
    ends = (_ERROR.search(part) for part in trace.split(_TRACEBACK)[1:])
    return [" ".join(end[0].split()) for end in ends if end is not None]
