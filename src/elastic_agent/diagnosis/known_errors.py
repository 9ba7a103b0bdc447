"""Recognises errors of PyTorch, gloo, NCCL, CUDA and Linux, and signals, and explains them. Pure.

The most important property of an error is its nature: whether it can be the first cause of a failure, or follows from
what happened to another worker. The errors are listed in ``known_errors.toml``, which is read when a worker has failed.
An error that was raised decides; what else a worker wrote is a possible reason at most.
"""

from __future__ import annotations

import enum
import functools
import re
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib import resources

import msgspec
from msgspec import Struct

from elastic_agent.printable import cut


class Nature(enum.StrEnum):
    """The cause that an error implies."""

    OWN = "own"
    """The worker's script, its data or a library is wrong."""
    ENVIRONMENT = "environment"
    """The machine lacks something or is configured wrongly: memory, disk, limits, names, devices."""
    NO_ANSWER = "no-answer"
    """Another worker did not answer in time: it was late, had ended, or cannot be reached over the network."""
    PEER = "peer"
    """Another worker, or the agent at the bootstrap store, is gone: a consequence."""
    STOPPED = "stopped"
    """The worker was told to stop: a consequence."""


CAUSES = frozenset({Nature.OWN, Nature.ENVIRONMENT})
"""Natures of errors that can be the first cause of a failure."""


class Case(Struct, frozen=True, forbid_unknown_fields=True):
    """The changes of a row where an observation of the machine was made; what is left out stays."""

    given: str
    """The name of the observation."""
    nature: Nature | None = None
    meaning: str = ""
    remedy: str = ""
    fact: str = ""


class KnownError(Struct, frozen=True, forbid_unknown_fields=True):
    """A row of ``known_errors.toml``, which describes the fields."""

    name: str
    nature: Nature
    match: tuple[str, ...]
    meaning: str
    remedy: str = ""
    fact: str = ""
    in_output: bool = False
    is_lasting: bool = False
    explained_by: tuple[str, ...] = ()
    cases: tuple[Case, ...] = ()

    def is_in(self, line: str) -> bool:
        """Return whether the line contains this error."""
        return _compiled(self.match).search(line) is not None

    def given(self, facts: Mapping[str, str]) -> KnownError:
        """Return the row as it reads on a machine of which these facts are known."""
        case = next((case for case in self.cases if case.given in facts), None)
        if case is None:
            return self
        changed = {field: getattr(case, field) for field in ("nature", "meaning", "remedy", "fact")}
        return msgspec.structs.replace(self, **{field: value for field, value in changed.items() if value})

    def observed(self, facts: Mapping[str, str]) -> str:
        """Return the observation that belongs to it; empty if it was not made."""
        return facts.get(self.fact, "") if facts.get(self.fact) != "0" else ""


class _Table(Struct, frozen=True, forbid_unknown_fields=True):
    error: tuple[KnownError, ...]


@functools.cache
def _compiled(match: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(match))


@dataclass(frozen=True)
class Recognised:
    """The known causes of a worker's end."""

    error: KnownError | None
    """The error that it raised; None: none that is known."""
    reason: KnownError | None = None
    """The error that may have led to it, by a line of its output."""
    evidence: str = ""
    """That line."""
    peer: str = ""
    """Address or name of the machine of the other worker that the error names, if it does."""
    rank: int | None = None
    """Rank of the other worker that the error names, if it does."""

    @property
    def nature(self) -> Nature:
        """The nature of what it raised."""
        return self.error.nature if self.error is not None else Nature.OWN

    @property
    def name(self) -> str:
        """The name of what it raised; empty if that is not known."""
        return self.error.name if self.error is not None else ""

    @property
    def is_killed_loader(self) -> bool:
        """Return whether a process of its DataLoader was killed."""
        return self.explanation is not None and self.explanation.name == "loader-killed"

    @property
    def explanation(self) -> KnownError | None:
        """The row that explains it best."""
        return self.reason or self.error

    @property
    def meaning(self) -> str:
        """The meaning, as far as it is known."""
        if self.reason is not None:
            return f"possibly {self.reason.meaning}, as it wrote: {self.evidence}"
        return self.error.meaning if self.error is not None else ""

    @property
    def remedy(self) -> str:
        """The remedy; empty if it is not known."""
        return self.explanation.remedy if self.explanation is not None else ""


NOT_RECOGNISED = Recognised(None)

_NO_FACTS: Mapping[str, str] = {}
_EVIDENCE_CHARACTERS = 160


@functools.cache
def known_errors() -> Mapping[str, KnownError]:
    """Read all rows, by name, in the order in which they are tried."""
    data = resources.files(__package__).joinpath("known_errors.toml").read_bytes()
    return {row.name: row for row in msgspec.toml.decode(data, type=_Table).error}


def known_error(raised: str, output: str = "", facts: Mapping[str, str] = _NO_FACTS) -> Recognised | None:
    """Return the known error that was raised, or None.

    Args:
        raised: the error. Lines after the first may belong to its message or not.
        output: what the worker wrote to stderr. It counts only where the error does not tell its cause.
        facts: what is known of the worker's machine.
    """
    rows = [row.given(facts) for row in known_errors().values()]
    line, _, rest = raised.partition("\n")
    found = _first(line, rows)
    if found is None:
        return None
    reasons = [row for row in rows if row.name in found.explained_by]
    for text in rest.splitlines() if reasons else ():
        known = _first(text, reasons)
        if known is not None:
            return Recognised(known, peer=_peer_in(text), rank=_rank_in(line))
    reason, evidence = _last_in(output, reasons, about=line) if reasons else (None, "")
    return Recognised(found, reason, evidence, _peer_in(line) or _peer_in(rest), _rank_in(line))


def possible_error(output: str, facts: Mapping[str, str] = _NO_FACTS) -> Recognised | None:
    """Return what may have ended a worker that raised no error, by its output and what is known of its machine."""
    rows = [row.given(facts) for row in known_errors().values() if row.in_output]
    reason, evidence = _last_in(output, rows)
    return Recognised(None, reason, evidence) if reason is not None else None


def _first(line: str, rows: Iterable[KnownError]) -> KnownError | None:
    return next((known for known in rows if known.is_in(line)), None)


def _last_in(text: str, rows: list[KnownError], about: str = "") -> tuple[KnownError | None, str]:
    """Return the row of the last line that is known, and the line.

    Not frames of tracebacks, whose source may contain any word, nor what torch logs in every run: of its warnings, only
    those about a host and port that the error names.
    """
    named = {*_HOST_AND_PORT.findall(about)}
    for line in reversed(text.splitlines()):
        if line.startswith("  ") or (is_warning(line) and not named & {*_HOST_AND_PORT.findall(line)}):
            continue
        known = _first(line, rows)
        if known is not None:
            return known, cut(line.strip(), _EVIDENCE_CHARACTERS)
    return None, ""


_PEERS = (
    re.compile(r"\[(?P<host>[0-9a-fA-F.:]+(?:%\w+)?)\]:\d+"),
    re.compile(r"remote=\[(?P<host>[^\]\s]+)\]"),
    re.compile(r"(?:peer|from|to) (?P<host>[\w.:%-]+)<\d+>"),
)
"""Addresses as gloo ("[10.0.0.2]:4711") and NCCL ("10.0.0.2<4711>") write them."""
_RANKS = (
    re.compile(r"Ranks? (?P<rank>\d++)(?:, ?\d++)*+ failed to pass monitoredBarrier"),
    re.compile(r"received errors while waiting for send/recv from rank (?P<rank>\d+)"),
)
_HOST_AND_PORT = re.compile(r"\([^()\s,]+, \d+\)")
"""As torch writes them."""
_CPP_PLACE = re.compile(r"\[(?:enforce fail at )?[\w./-]+\.(?:cc|cpp|h|hpp):\d+\](?: \.)? ?")
_ADVICE = re.compile(r"\. This is typically caused by a remote worker .*|\.?Collectives differ in .*$")
_WARNING = re.compile(r"\[[IW]\d{4} \d\d:\d\d:\d\d\.\d+")


def _peer_in(text: str) -> str:
    for pattern in _PEERS:
        found = pattern.search(text)
        if found is not None:
            return found["host"].removeprefix("::ffff:")
    return ""


def _rank_in(text: str) -> int | None:
    found = next(filter(None, (pattern.search(text) for pattern in _RANKS)), None)
    return int(found["rank"]) if found is not None else None


def is_warning(line: str) -> bool:
    """Return whether torch logged it as information or a warning, as it does in runs that succeed."""
    return _WARNING.match(line) is not None


def readable(error: str) -> str:
    """Remove places in C++ sources, and what is the same in all errors of gloo."""
    return _ADVICE.sub("", _CPP_PLACE.sub("", error)).strip()


# -- signals -----------------------------------------------------------------------------------

_SHELL_BASE = 128
"""Shells exit with this plus the number of the signal that killed their child."""

MEANINGS = {
    "SIGKILL": "",
    "SIGSEGV": "crash in native code",
    "SIGBUS": "shared memory full? see df /dev/shm",
    "SIGABRT": "aborted by native code",
    "SIGILL": "built for a different processor?",
    "SIGFPE": "crash in native code",
}
"""By name; empty: anything may have sent it."""

REMEDIES = {
    "SIGKILL": "find out what killed it: the kernel log (dmesg), the job manager, or a user of this machine",
    "SIGSEGV": "see the stack on its stderr; often libraries of different CUDA or NCCL versions are mixed",
    "SIGBUS": "enlarge /dev/shm (docker --shm-size=8g), or use fewer DataLoader workers",
    "SIGABRT": "the last lines on its stderr say why",
    "SIGILL": "install packages that are built for the processor of this machine",
    "SIGFPE": "see the stack on its stderr",
    "SIGTERM": "find out what sends SIGTERM; to stop a node or the run, send it to the agent instead of to a worker",
    "SIGINT": "find out what sends SIGINT; to stop a node or the run, send it to the agent instead of to a worker",
    "SIGHUP": "start the agent in a session of its own (setsid, nohup or systemd)",
}
"""By name."""


def signal_name(returncode: int | None) -> str:
    """Return the name of the signal that ended a process with this code; empty if none did.

    Or that ended the child of a shell, which reports it by a code of its own.
    """
    if returncode is None or 0 <= returncode <= _SHELL_BASE:
        return ""
    number = -returncode if returncode < 0 else returncode - _SHELL_BASE
    try:
        return signal.Signals(number).name
    except ValueError:
        if returncode > 0:
            return ""
        is_real_time = signal.SIGRTMIN < number < signal.SIGRTMAX
        return f"SIGRTMIN+{number - signal.SIGRTMIN}" if is_real_time else f"signal {number}"


def ending(returncode: int | None) -> str:
    """Return how a process ended, such as "exited with code 3"; it begins with one of ``cause.VERBS``."""
    if returncode is None:
        return "ended"
    name = signal_name(returncode)
    if returncode >= 0:
        return f"exited with code {returncode}{f' (128 + {name})' if name else ''}"
    return "was terminated by SIGTERM" if name == "SIGTERM" else f"was killed by {name}"
