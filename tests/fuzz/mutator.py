"""Makes inputs out of valid ones: damages their bytes, or replaces parts of what they mean; the same for a seed."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Sequence
from functools import lru_cache

_TOKEN = re.compile(
    rb'"(?:[^"\\]|\\.)*"|[0-9]+(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?|[A-Za-z_][\w.-]*|\s+|.', re.DOTALL
)

_DEPTH = 3_000
"""More than Python's limit of calls inside each other."""

_NUMBERS = (
    b"0", b"-0", b"-1", b"1", b"2", b"255", b"65535", b"65536", b"2147483648", b"9007199254740993",
    b"9223372036854775807", b"9223372036854775808", b"18446744073709551616", b"-9223372036854775809", b"1e308",
    b"1e309", b"-1e309", b"1e-400", b"0.1", b"1.5", b"NaN", b"Infinity", b"-Infinity", b"0x10", b"1_0", b"+1", b"007",
    "١٢".encode(), "²".encode(), b"9" * 400, b"9" * 5000, b"1e999999999",
)  # fmt: skip
_TEXTS = (
    b"", b"a", b"..", b".", b"/", b"../../etc/passwd", b"\x00", b"\\u0000", b"\\ud800", b"\\udc00\\ud800", b"\\u202e",
    b"\x1b[2J", b"\\u001b]0;x\\u0007", b"\x9b31m", "\u009b31m".encode(), "\u202e".encode(), b"\xff\xfe", b"\xc0\xaf",
    b"\xed\xa0\x80", b"\xf4\x90\x80\x80", b"%s%n{}{0.__class__}", b"a b", b"\n", b"\r\n", b"\t", b"'", b"\\",
    b",", b":",
    b"[::1]", b"[1-99999]", "é".encode(), "𝟙".encode(), b"x" * 129, b"x" * 600, b"x" * 70_000,
    b"?", b"-", b"EA2", b"null",
)  # fmt: skip
_VALUES = (
    b"null", b"true", b"false", b"[]", b"{}", b"[[]]", b'{"":0}', b'""', b'"a"', b"[null]", b"[0,0]", b'{"a":{"a":{}}}',
)  # fmt: skip


class Mutator:
    """Makes one input after another of these valid ones."""

    def __init__(self, samples: Sequence[bytes], seed: str) -> None:
        self._samples = samples
        self._dice = random.Random(seed)
        self._ways: tuple[Callable[[bytes], bytes], ...] = (
            *(self._flip, self._cut, self._insert, self._repeat, self._splice),
            *(
                self._replace_token,
                self._replace_token,
                self._replace_token,
                self._drop_tokens,
                self._double_tokens,
            ),
            *(self._replace_text, self._replace_text, self._overwrite),
        )

    def next(self) -> bytes:
        """The next input."""
        chance = self._dice.random()
        if chance < 0.03:
            return self._dice.choice(self._samples)
        if chance < 0.07:
            return self._dice.randbytes(self._dice.randrange(200))
        if chance < 0.072:
            return self._nested()
        data = self._dice.choice(self._samples)
        data = self._dice.choice(self._ways)(data)
        while self._dice.random() < 0.3:
            data = self._dice.choice(self._ways)(data)
        return data

    # -- bytes ----------------------------------------------------------------------------------

    def _at(self, data: bytes) -> int:
        return self._dice.randrange(len(data) + 1)

    def _flip(self, data: bytes) -> bytes:
        if not data:
            return b"\x00"
        changed = bytearray(data)
        for _ in range(1 + int(self._dice.random() * 3)):
            changed[int(self._dice.random() * len(changed))] ^= 1 << int(self._dice.random() * 8)
        return bytes(changed)

    def _overwrite(self, data: bytes) -> bytes:
        at = self._at(data)
        more = self._dice.randbytes(1 + int(self._dice.random() * 8))
        return data[:at] + more + data[at + len(more) :]

    def _cut(self, data: bytes) -> bytes:
        return data[: self._at(data)] if self._dice.random() < 0.7 else data[self._at(data) :]

    def _insert(self, data: bytes) -> bytes:
        at = self._at(data)
        return data[:at] + self._dice.choice(_TEXTS) + data[at:]

    def _repeat(self, data: bytes) -> bytes:
        start = self._at(data)
        part = data[start : start + int(self._dice.random() * 20)]
        times = self._dice.choice((1, 2, 10, 200)) if self._dice.random() < 0.98 else _DEPTH
        return data[:start] + part * times + data[start:]

    def _splice(self, data: bytes) -> bytes:
        other = self._dice.choice(self._samples)
        return data[: self._at(data)] + other[self._at(other) :]

    def _nested(self) -> bytes:
        opening, closing = self._dice.choice(((b"[", b"]"), (b'{"a":', b"}"), (b"(", b")"), (b"[1-2]", b"")))
        data = opening * _DEPTH + b"0" + closing * (_DEPTH if self._dice.random() < 0.7 else 0)
        sample = self._dice.choice(self._samples)
        tokens = _tokens(sample)
        if self._dice.random() < 0.3 or not tokens:
            return data
        at = self._dice.randrange(len(tokens))
        return b"".join((*tokens[:at], data, *tokens[at + 1 :]))

    # -- parts ----------------------------------------------------------------------------------

    def _replace_token(self, data: bytes) -> bytes:
        tokens = _tokens(data)
        if not tokens:
            return data
        at = int(self._dice.random() * len(tokens))
        return b"".join((*tokens[:at], self._other(tokens[at]), *tokens[at + 1 :]))

    def _other(self, token: bytes) -> bytes:
        chance = self._dice.random()
        if token[:1] == b'"' and chance < 0.7:
            return b'"' + self._dice.choice(_TEXTS) + b'"'
        if chance < 0.4:
            return self._dice.choice(_NUMBERS)
        return self._dice.choice(_VALUES) if chance < 0.7 else self._dice.choice(_TEXTS)

    def _replace_text(self, data: bytes) -> bytes:
        """Part of a text, or of a name."""
        tokens = _tokens(data)
        if not tokens:
            return data
        at = int(self._dice.random() * len(tokens))
        token = tokens[at]
        inside = int(self._dice.random() * (len(token) + 1))
        token = token[:inside] + self._dice.choice(_TEXTS) + token[inside:]
        return b"".join((*tokens[:at], token, *tokens[at + 1 :]))

    def _some(self, tokens: Sequence[bytes]) -> tuple[int, int]:
        start = int(self._dice.random() * len(tokens))
        return start, start + 1 + int(self._dice.random() * 6)

    def _drop_tokens(self, data: bytes) -> bytes:
        tokens = _tokens(data)
        if not tokens:
            return data
        start, end = self._some(tokens)
        return b"".join((*tokens[:start], *tokens[end:]))

    def _double_tokens(self, data: bytes) -> bytes:
        """Keys become double, lists longer."""
        tokens = _tokens(data)
        if not tokens:
            return data
        start, end = self._some(tokens)
        return b"".join((*tokens[:end], b"," if self._dice.random() < 0.5 else b"", *tokens[start:]))


@lru_cache(maxsize=256)
def _tokens(data: bytes) -> tuple[bytes, ...]:
    """Strings, numbers, words, and every other byte by itself; nothing of what is very long."""
    return tuple(_TOKEN.findall(data)) if len(data) <= 20_000 else ()
