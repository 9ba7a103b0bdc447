"""What is fuzzed: a decoder or parser with valid inputs, and what must hold for every input."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

_RAW_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


class ViolationError(AssertionError):
    """What a decoder promises does not hold; the message says what."""


@dataclass(frozen=True)
class Target:
    """One decoder, or several that belong together."""

    name: str
    samples: Sequence[bytes]
    """Valid inputs, as the encoder makes them."""
    feed: Callable[[bytes], object]
    """Decodes an input. Returns if it was decoded, or refused with the error that the decoder documents; raises
    everything else."""
    covers: tuple[str, ...] = ()
    """The functions of the package that decode, as ``package/module.py function``."""
    weight: float = 1.0
    """How many inputs it gets, compared with others; those that need files or sockets get fewer."""
    close: Callable[[], object] = field(default=lambda: None)
    slow_s: float = 0.05
    """An input that takes more processor time, twice, is reported."""


def check_shown(text: str) -> None:
    """This text reaches a terminal: no control characters but newlines and tabs, no surrogates.

    Raises:
        ViolationError: there is one.
    """
    if found := _RAW_CONTROLS.search(text):
        raise ViolationError(
            f"{found[0]!r} in what is shown: {text[max(0, found.start() - 40) : found.end() + 20]!r}"
        )
