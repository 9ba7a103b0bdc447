"""Makes inputs out of valid ones: damages their bytes, or replaces parts of what they mean."""

from __future__ import annotations

import functools
import re
import signal
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

INPUTS_OF_MAKE_TEST = 40
HANG_S, SLOW_S = 10.0, 1.0
"""Limits of processor time for one input: in ``make test``, on any machine, and else."""
_DEPTH = 3_000
"""More than Python's limit of calls inside each other."""

_TOKEN = re.compile(
    rb'"(?:[^"\\]|\\.)*"|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[A-Za-z_][\w.-]*|\s+|.', re.DOTALL
)
_NUMBERS = (
    b"0", b"-0", b"-1", b"255", b"65536", b"9007199254740993", b"18446744073709551616", b"-9223372036854775809",
    b"1e309", b"-1e309", b"1e-400", b"0.1", b"NaN", b"-Infinity", b"0x10", b"1_0", b"+1", b"007", "١٢".encode(),
    "²".encode(), b"9" * 400, b"9" * 5000, b"1e999999999",
)  # fmt: skip
_TEXTS = (
    b"", b"a", b"..", b"/", b"../../etc/passwd", b"\x00", b"\\u0000", b"\\ud800", b"\\u202e", b"\x1b[2J",
    b"\\u001b]0;x\\u0007", b"\x9b31m", "\u009b31m".encode(), "\u202e".encode(), b"\xff\xfe", b"\xed\xa0\x80",
    b"%s%n{}{0.__class__}", b"a b", b"\r\n", b"\t", b"'", b"\\", b",", b":", b"[::1]", b"[1-99999]", "𝟙".encode(),
    b"x" * 129, b"x" * 70_000, b"?", b"-", b"null",
)  # fmt: skip
_VALUES = (b"null", b"true", b"[]", b"{}", b'{"":0}', b'""', b'"a"', b"[null]", b'{"a":{"a":{}}}')
_NESTED = tuple(
    opening * _DEPTH + b"0" + end * _DEPTH
    for opening, closing in ((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"[1-2]", b""))
    for end in {closing, b""}
)
_RAW_CONTROLS = re.compile(
    "[\x00-\x08\x0b-\x1f\x7f-\x9f\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069\ud800-\udfff]"
)


def fuzzed(*samples: bytes, nested: bool = True) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Call a test with each of these valid inputs, and with damaged ones, as ``data``.

    It passes if the input is soon decoded, or refused with the error that the decoder documents. Few damaged inputs in
    ``make test``, more in ``make prove``, INPUTS in ``make fuzz``. A file in ``tmp_path`` is replaced each time.
    """
    chosen = settings.default or settings()
    count, limit_s = (INPUTS_OF_MAKE_TEST, HANG_S) if chosen.derandomize else (chosen.max_examples, SLOW_S)

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def bounded(data: bytes, **fixtures: Any) -> None:
            with _no_more_than(limit_s, data):
                test(data=data, **fixtures)

        made: Any = given(data=damaged(samples, nested))(bounded)
        for sample in samples:
            made = example(data=sample)(made)
        return settings(max_examples=count, suppress_health_check=list(HealthCheck))(made)

    return decorate


class HangError(BaseException):
    """An input takes too long. No ``Exception``: neither decoders nor hypothesis, which would try again, catch it."""


@contextmanager
def _no_more_than(limit_s: float, data: bytes) -> Iterator[None]:
    """Fail in the middle of what takes more processor time; pytest's own limit would not show the input."""

    def fail(*_: object) -> None:
        raise HangError(f"more than {limit_s:g} s of processor time for {data[:2000]!r} ({len(data)} bytes)")

    before = signal.signal(signal.SIGVTALRM, fail)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def damaged(samples: Sequence[bytes], nested: bool) -> st.SearchStrategy[bytes]:
    """Return the strategy of inputs made of these."""
    new = [
        st.sampled_from(_NUMBERS),
        st.sampled_from(_VALUES),
        st.sampled_from(_TEXTS),
        st.binary(max_size=8),
    ]
    new += [st.sampled_from([b'"' + text + b'"' for text in _TEXTS])]
    new += [st.sampled_from(_NESTED)] * nested
    edits = st.lists(
        st.tuples(st.booleans(), st.floats(0, 1), st.integers(0, 6), st.integers(0, 3), st.one_of(new)),
        min_size=1,
        max_size=4,
    )
    return st.one_of(st.builds(_edited, st.sampled_from(samples), edits), st.binary(max_size=200))


def _edited(data: bytes, edits: Sequence[tuple[bool, float, int, int, bytes]]) -> bytes:
    """Repeat or remove, one after the other, some tokens or bytes at a place, and insert others there."""
    for by_tokens, place, count, times, new in edits:
        is_short = len(data) <= 20_000
        pieces = _TOKEN.findall(data) if by_tokens and is_short else [bytes((byte,)) for byte in data]
        at = int(place * len(pieces))
        repeated = (0, 0, 1, 200)[times] * pieces[at : at + count]
        data = b"".join((*pieces[:at], new, *repeated, *pieces[at + count :]))
    return data


def check_shown(text: str) -> None:
    """Fail if this text, which reaches a terminal, has control characters but newlines and tabs, or surrogates."""
    found = _RAW_CONTROLS.search(text)
    assert found is None, f"in what is shown: {text[max(0, found.start() - 40) : found.end() + 20]!r}"
