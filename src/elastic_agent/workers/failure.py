"""The description of a worker's failure: which worker, how it ended, and the error in one line.

Pure: works on the guard's events and the content of the worker's error file.
"""

from __future__ import annotations

import json
import re
import signal
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_agent.diagnosis.known_errors import (
    CAUSES,
    MEANINGS,
    Recognised,
    ending,
    is_warning,
    known_error,
    possible_error,
    readable,
    signal_name,
)
from elastic_agent.printable import one_line, plain
from elastic_agent.workers.signature import signature, signature_at
from elastic_agent.workers.tracebacks import (
    Traceback,
    last_fatal_error,
    last_of_script,
    script_line,
    shortened,
    without_requested_stacks,
)

MESSAGE_CHARACTERS = 500
TAIL_BYTES = 2 * 1024

# torch's exception hook puts the rank before every line of a traceback.
_RANK_PREFIX = re.compile(r"^\[rank\d+\]: ?", re.MULTILINE)
# Of exceptions whose message begins with a new line.
_MESSAGE_BELOW = re.compile(r"^([A-Za-z_][\w.]*(?:Error|Exception):) ?\n\s*(?=\S)", re.MULTILINE)
# What the C++ runtime and Python print before they abort.
_NATIVE = re.compile(r"^(?:\s*what\(\): +|Fatal Python error: )(.+)$", re.MULTILINE)

_ABORTED_AFTER_EXCEPTION = "terminate called without an active exception"
"""The message of the C++ runtime if a thread, such as one of gloo's, still runs when Python exits after an
exception."""
_MISMATCH = "collective-shapes"
"""The known error of workers that pass tensors of different sizes to a collective."""
_SENT = frozenset({"SIGKILL", "SIGTERM", "SIGINT", "SIGHUP"})
"""Signals sent from outside: a worker's output before does not explain them."""
_SYNTAX = ("SyntaxError: ", "IndentationError: ", "TabError: ")
_FINAL_LINE = re.compile(rf"(?:{'|'.join(_SYNTAX)})|(?:[\w./-]+: )?[Ee]rror: ")
"""The beginnings of errors that end a program without a traceback: of its syntax, and of its arguments
(argparse, click)."""
_SEMAPHORE = "_multiprocessing.SemLock("
"""Opens a file in /dev/shm, which its error does not name."""
_LONGEST_SUMMARY = 510
_NAMELESS = re.compile(r"^.*\[W[^\]\n]* socket\.cpp:\d+\].* cannot be retrieved.*\n?", re.MULTILINE)
"""Warnings of torch that machines have no names, as in most runs."""
_WARNED = re.compile(r"^(.+:\d+: \w*Warning: .*)\n  \S.*$", re.MULTILINE)
"""A warning, and the line of source that Python prints under it."""
_KEPT_LINES = 4
"""The number of lines kept of what a worker wrote before a signal ended it."""


@dataclass(frozen=True)
class WorkerFailure:
    """The failure of one worker.

    `returncode` is negative for a signal, whose name is then `signal_name` ("" otherwise). `message` is the error that
    was raised on one line, at most 500 characters, "" if none is known; then `last_line` is the last one of its output.
    `tail` is the end of its traceback or stderr, at most 2 KiB of UTF-8. `no_room`: why its output could not be written
    to its files, "" if it could.
    """

    slot: int
    returncode: int
    signal_name: str
    message: str
    tail: str
    no_room: str = ""
    last_line: str = ""
    signature: str = ""
    """The same for the same error; see :func:`.signature.signature`."""
    recognised: Recognised | None = None
    """The known error, or what may have led to the end."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Observations of the machine; see :mod:`.facts`."""
    line: str = ""
    """The position of the script, such as ``train.py:88``, if the tail tells."""

    @property
    def error(self) -> str:
        """Return the error that was raised; if that is missing because the disk of its output is full, say that."""
        return self.message or _no_space(self.no_room)

    @property
    def was_out_of_memory(self) -> bool:
        """Return whether the kernel killed it, or a process of its DataLoader, because the memory was used up."""
        loader = self.recognised is not None and self.recognised.is_killed_loader
        return (self.signal_name == "SIGKILL" or loader) and self.facts.get("oom_kills", "0") not in ("", "0")

    def summary(self, node_id: str) -> str:
        """Return one line, such as "worker n2/0 exited with code 1: RuntimeError: boom"."""
        head = f"worker {node_id}/{self.slot} {ending(self.returncode)}"
        if self.signal_name and self.line:
            head = f"{head} at {self.line}"
        if self.no_room:
            head = f"{head} ({_no_space(self.no_room)})"
        hint = "" if self.no_room else self._hint()
        known = f"{head}: {readable(self.message)}" if self.message else head
        if not self.message and self.last_line:
            known = f"{head}; its last line: {self.last_line}"
        if not hint:
            return known
        room = _LONGEST_SUMMARY - len(hint) - len("… ()")
        return f"{known if len(known) <= room else known[:room] + '…'} ({hint})"

    def _hint(self) -> str:
        """Return what was observed besides the error. Its meaning and the remedy are told with the root cause."""
        if self.was_out_of_memory:
            limit = self.facts.get("memory_limit")
            return f"out of memory: the limit is {limit}" if limit else "out of memory"
        if self.recognised is None:
            return "" if self.message else MEANINGS.get(self.signal_name, "")
        if self.recognised.reason is not None:
            return f"possibly {self.recognised.reason.meaning}"
        if self.recognised.nature in CAUSES:
            known = self.recognised.explanation
            return known.observed(self.facts) if known is not None else ""
        return self.recognised.meaning


def describe(
    slot: int,
    returncode: int,
    error_file: str,
    stderr_tail: str,
    no_room: str = "",
    facts: Mapping[str, str] | None = None,
    noted: str = "",
) -> WorkerFailure:
    """Describe the failure of a worker that ended with `returncode`.

    `error_file` is the content of the file that torch's `@record` writes, "" when there is none; anything
    but what torch writes is ignored. Without it the error is read from the end of stderr. `noted` is the error that
    the worker noted when its script ended, in one line that may be cut; it may have been stopped before it wrote it.
    """
    raised, tail = _from_error_file(error_file) if error_file else ("", "")
    stderr_tail = without_requested_stacks(plain(stderr_tail))
    stderr = _MESSAGE_BELOW.sub(r"\1 ", _RANK_PREFIX.sub("", stderr_tail))
    fatal = last_fatal_error(stderr) if returncode < 0 else None
    if fatal is not None:
        stderr = fatal.before
    trace = _final_traceback(returncode, stderr)
    if trace is not None and noted and not _is_of(trace, noted):
        trace = None
    message = one_line(raised, MESSAGE_CHARACTERS)
    if not raised:
        raised = _raised(returncode, stderr, trace, noted)
        message = one_line(trace.error if trace is not None else raised, MESSAGE_CHARACTERS)
        tail = trace.text.removesuffix(f"\n{_ABORTED_AFTER_EXCEPTION}") if trace is not None else ""
    if fatal is not None and trace is None:
        tail = fatal.with_stack(_last_lines(stderr))
    name = signal_name(returncode) if returncode < 0 else ""
    facts = facts or {}
    recognised = known_error(raised, stderr, facts) if raised else None
    if not raised and no_room:
        recognised = known_error(_no_space(no_room))
    elif not raised and name not in _SENT:
        recognised = possible_error(stderr, facts)
    last_line = one_line(_last_line(stderr), MESSAGE_CHARACTERS) if not message and returncode > 0 else ""
    line = script_line(tail or (stderr if message.startswith(_SYNTAX) else ""))
    same = _fixed_signature(returncode, recognised, message, line)
    if same is None:
        is_lasting = bool(recognised and recognised.error and recognised.error.is_lasting)
        # The code with which the worker would have exited if it had not been aborted.
        own_code = 1 if trace is not None and returncode == -signal.SIGABRT else returncode
        same = signature(own_code, message or last_line, tail or stderr, is_lasting)
    return WorkerFailure(
        slot=slot,
        returncode=returncode,
        signal_name=name,
        message=message,
        tail=_last_bytes(shortened(tail, TAIL_BYTES) if tail else _NAMELESS.sub("", stderr_tail)),
        no_room=no_room,
        last_line=last_line,
        signature="" if no_room else same,
        recognised=recognised,
        facts=facts,
        line=line,
    )


def _fixed_signature(returncode: int, recognised: Recognised | None, message: str, line: str) -> str | None:
    """Return the signature of an error that is the same where its traceback or message differs; None: of others."""
    if returncode == -signal.SIGABRT and recognised is not None and recognised.name == _MISMATCH:
        # gloo aborted the worker because others passed tensors of another size.
        return signature_at(message, line)
    if recognised is not None and recognised.reason is not None and recognised.reason.is_lasting:
        return signature_at(recognised.reason.name, line)
    return None


def _no_space(no_room: str) -> str:
    return f"no space for its output: {no_room}" if no_room else ""


def _final_traceback(returncode: int, stderr: str) -> Traceback | None:
    """Return the traceback of the exception that ended the worker, if one did.

    1 is the code of an exception that was not caught; with others, those in the output were. But a worker may be
    aborted, or stopped by its agent, while it exits because of an exception, and Python ends itself by SIGINT after an
    uncaught KeyboardInterrupt.
    """
    if returncode == 1 or (returncode == -signal.SIGABRT and _ABORTED_AFTER_EXCEPTION in stderr):
        return last_of_script(stderr)
    if returncode not in (-signal.SIGTERM, -signal.SIGINT):
        return None
    trace = last_of_script(stderr)
    if returncode == -signal.SIGINT:
        return trace if trace is not None and trace.error.startswith("KeyboardInterrupt") else None
    end = stderr.rstrip().removesuffix(_ABORTED_AFTER_EXCEPTION).rstrip()
    return trace if trace is not None and end.endswith(trace.error) else None


def _from_error_file(content: str) -> tuple[str, str]:
    """Return (message, traceback) out of what torch writes.

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


def _raised(returncode: int, stderr: str, trace: Traceback | None, noted: str) -> str:
    """Return the error that ended the worker; empty if none is known. What else it wrote may be anything."""
    if trace is not None:
        error = noted or trace.error
        return "\n".join((f"/dev/shm: {error}" if _SEMAPHORE in trace.text else error, *trace.rest))
    if noted:
        return noted
    if returncode < 0:
        native = _NATIVE.findall(stderr)
        return native[-1] if native else ""
    last = _last_line(stderr)
    return last if _FINAL_LINE.match(last) else ""


def _is_of(trace: Traceback, noted: str) -> bool:
    """Return whether it is the traceback of the error that the worker noted; another one may have been caught and
    logged."""
    return noted.startswith(" ".join(trace.error.split())[: max(1, len(noted) - 1)])


def _last_line(stderr: str) -> str:
    """Return the last line that says something; not a warning of torch: it warns about names at almost every
    connection.

    Neither is it the line of source that Python prints under a warning.
    """
    lines = _WARNED.sub(r"\1", stderr).splitlines()
    return next(
        (line for line in reversed(lines) if any(map(str.isalnum, line)) and not is_warning(line)), ""
    )


def _last_lines(text: str) -> str:
    """Return the last lines of stderr, without torch's warnings."""
    lines = [line for line in text.splitlines() if line.strip() and not is_warning(line)]
    return "\n".join(lines[-_KEPT_LINES:])


def _last_bytes(text: str) -> str:
    """Return the last 2 KiB, from the beginning of a line where one begins there."""
    data = text.strip().encode()
    if len(data) <= TAIL_BYTES:
        return data.decode()
    cut = data[-TAIL_BYTES:]
    _, newline, rest = cut.partition(b"\n")
    return (rest if newline and rest else cut).decode(errors="ignore")
