"""Recognises errors of PyTorch, gloo, NCCL, CUDA and Linux in what a worker wrote, and explains them. Pure.

The most important property of an error is its nature: whether it can be the first cause of a failure, or follows from
what happened to another worker. The errors themselves are listed in :mod:`.catalogue`.
"""

from __future__ import annotations

import enum
import re
from dataclasses import dataclass, field


class Nature(enum.StrEnum):
    """What an error says about its cause."""

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


@dataclass(frozen=True)
class Symptom:
    """An error that is known.

    `meaning` and `remedy` are single lines without a full stop; `remedy` is empty where the remedy depends on the
    first cause. `fact`: name of the observation of the machine that belongs to it, such as ``disk_full``.
    """

    name: str
    nature: Nature
    pattern: re.Pattern[str] = field(repr=False)
    meaning: str
    remedy: str = ""
    fact: str = ""


@dataclass(frozen=True)
class Recognised:
    """A known error in a text."""

    symptom: Symptom
    peer: str = ""
    """Address or name of the machine of the other worker that the error names, if it does."""
    rank: int | None = None
    """Rank of the other worker that the error names, if it does."""


_PEERS = (
    re.compile(r"\[(?P<host>[0-9a-fA-F.:]+(?:%\w+)?)\]:\d+"),
    re.compile(r"remote=\[(?P<host>[^\]\s]+)\]"),
    re.compile(r"(?:peer|from|to) (?P<host>[\w.:%-]+)<\d+>"),
)
"""How gloo ("[10.0.0.2]:4711") and NCCL ("10.0.0.2<4711>") write addresses."""
_CPP_PLACE = re.compile(r"\[(?:enforce fail at )?[\w./-]+\.(?:cc|cpp|h|hpp):\d+\](?: \.)? ?")
_ADVICE = re.compile(r"\. This is typically caused by a remote worker .*|\.?Collectives differ in .*$")
_RANKS = (
    re.compile(r"Ranks? (?P<rank>\d++)(?:, ?\d++)*+ failed to pass monitoredBarrier"),
    re.compile(r"received errors while waiting for send/recv from rank (?P<rank>\d+)"),
)


_WARNING = re.compile(r"\[[IW]\d{4} \d\d:\d\d:\d\d\.\d+")


def is_warning(line: str) -> bool:
    """Whether torch logged it as information or a warning, as it does in runs that succeed."""
    return _WARNING.match(line) is not None


def recognise(text: str, symptoms: tuple[Symptom, ...]) -> Recognised | None:
    """The first of the symptoms that occurs in the text, with the other worker that it names."""
    for symptom in symptoms:
        found = symptom.pattern.search(text)
        if found is not None:
            rest = text[found.start() :]
            return Recognised(symptom, _peer_in(rest), _rank_in(text))
    return None


def readable(error: str) -> str:
    """Without places in C++ sources, and without what is the same in all errors of gloo."""
    return _ADVICE.sub("", _CPP_PLACE.sub("", error)).strip()


def _peer_in(text: str) -> str:
    line = text.partition("\n")[0] or text
    for part in (line, text):
        for pattern in _PEERS:
            found = pattern.search(part)
            if found is not None:
                return found["host"].removeprefix("::ffff:")
    return ""


def _rank_in(text: str) -> int | None:
    for pattern in _RANKS:
        found = pattern.search(text)
        if found is not None:
            return int(found["rank"])
    return None
