"""The description of a worker's failure: which worker, how it ended, and the error in one line.

Pure: works on the guard's events and the content of the worker's error file.
"""

from __future__ import annotations

import json
import re
import signal
from dataclasses import dataclass

from elastic_agent.printable import plain
from elastic_agent.workers.signature import signature
from elastic_agent.workers.tracebacks import Traceback, last_of_script, shortened

MESSAGE_CHARACTERS = 500
TAIL_BYTES = 2 * 1024

# torch's exception hook puts the rank before every line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# What the C++ runtime and Python print before they abort.
_NATIVE = re.compile(r"^(?:\s*what\(\): +|Fatal Python error: )(.+)$", re.MULTILINE)

_HINTS = {
    "SIGKILL": "out of memory? see dmesg",
    "SIGSEGV": "crash in native code",
    "SIGBUS": "shared memory full? see df /dev/shm",
    "SIGABRT": "aborted by native code",
    "SIGILL": "built for a different processor?",
    "SIGFPE": "crash in native code",
}


@dataclass(frozen=True)
class WorkerFailure:
    """How one worker failed.

    `returncode` is negative for a signal, whose name is then `signal_name` ("" otherwise). `message` is the
    error on one line, at most 500 characters, "" when nothing is known. `tail` is the end of its traceback
    or stderr, at most 2 KiB of UTF-8. `no_room`: why its output could not be written to its files, "" if it could.
    """

    slot: int
    returncode: int
    signal_name: str
    message: str
    tail: str
    no_room: str = ""
    signature: str = ""
    """The same for the same error; see :func:`.signature.signature`."""

    def summary(self, node_id: str) -> str:
        """One line, such as "worker n2/0 exited with code 1: RuntimeError: boom"."""
        worker = f"worker {node_id}/{self.slot}"
        if not self.signal_name:
            head = f"{worker} exited with code {self.returncode}"
        elif self.signal_name == "SIGTERM":
            head = f"{worker} was terminated by SIGTERM"
        else:
            head = f"{worker} was killed by {self.signal_name}"
        if self.no_room:
            head = f"{head} (no space for its output: {self.no_room})"
        if self.message:
            return f"{head}: {self.message}"
        hint = _HINTS.get(self.signal_name)
        return f"{head} ({hint})" if hint and not self.no_room else head


def describe(
    slot: int, returncode: int, error_file: str, stderr_tail: str, no_room: str = ""
) -> WorkerFailure:
    """The failure of a worker that ended with `returncode`.

    `error_file` is the content of the file that torch's `@record` writes, "" when there is none; anything
    but what torch writes is ignored. Without it the error is read from the end of stderr.
    """
    message, tail = _from_error_file(error_file) if error_file else ("", "")
    stderr_tail = plain(stderr_tail)
    stderr = _RANK_PREFIX.sub("", stderr_tail)
    # 1 is the code of an exception that was not caught; with others, those in the output were.
    trace = last_of_script(stderr) if returncode == 1 else None
    if not message:
        message = _error_in(stderr, returncode, trace)
        tail = trace.text if trace is not None else ""
    known = _one_line(message)
    return WorkerFailure(
        slot=slot,
        returncode=returncode,
        signal_name=signal_name(returncode),
        message=known,
        tail=_last_bytes(shortened(tail, TAIL_BYTES) if tail else stderr_tail),
        no_room=no_room,
        signature="" if no_room else signature(returncode, known, tail or stderr),
    )


def signal_name(returncode: int) -> str:
    """Of the signal that ended a process with this (negative) code; empty if none did."""
    if returncode >= 0:
        return ""
    try:
        return signal.Signals(-returncode).name
    except ValueError:
        return f"signal {-returncode}"


def _from_error_file(content: str) -> tuple[str, str]:
    """(message, traceback) out of what torch writes.

    That is `{"message": {"message": text, "extraInfo": {"py_callstack": text}}}`, or `{"message": text}`.
    """
    try:
        message = json.loads(content)["message"]
    except (ValueError, TypeError, KeyError, RecursionError):
        return "", ""
    if isinstance(message, str):
        return plain(message), ""
    if not isinstance(message, dict) or not isinstance(message.get("message"), str):
        return "", ""
    extra = message.get("extraInfo")
    stack = extra.get("py_callstack") if isinstance(extra, dict) else None
    return plain(message["message"]), plain(stack) if isinstance(stack, str) else ""


def _error_in(stderr: str, returncode: int, trace: Traceback | None) -> str:
    """The most informative line of `stderr`: the script's last exception, a native error, the last line."""
    if returncode < 0:
        native = _NATIVE.findall(stderr)
        return native[-1] if native else ""
    if trace is not None:
        return trace.error
    lines = [line for line in stderr.splitlines() if any(map(str.isalnum, line))]
    return lines[-1] if lines else ""


def _one_line(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MESSAGE_CHARACTERS else line[: MESSAGE_CHARACTERS - 1] + "…"


def _last_bytes(text: str) -> str:
    """The last 2 KiB, from the beginning of a line where one begins there."""
    data = text.strip().encode()
    if len(data) <= TAIL_BYTES:
        return data.decode()
    cut = data[-TAIL_BYTES:]
    _, newline, rest = cut.partition(b"\n")
    return (rest if newline and rest else cut).decode(errors="ignore")
