"""Text from elsewhere (a worker's output, a record) made safe to record and to show; lists, sizes and lengths of time.

Unsafe are control characters, C1 ones (U+0080 to U+009F, in which terminals find escape sequences too) included,
characters that change the direction of what follows, and lone surrogates, which no UTF-8 can hold.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

_DIRECTION = "\u061c\u200e\u200f\u202a-\u202e\u2066-\u2069"
"""Unicode's Bidi_Control."""
_STRING_ENDS = r"\x07|\x1b\\|\x9c"
_SEQUENCES = re.compile(
    "|".join(
        (
            r"(?:\x1b\[|\x9b)[0-?]*[ -/]*[@-~]",
            rf"(?:\x1b\]|\x9d)[^\x07\x1b\x9b-\x9d]*(?:{_STRING_ENDS})",
            r"\x1b[@-Z\\^_]",
        )
    )
)
_UNSAFE = re.compile(rf"[\x00-\x08\x0b-\x1f\x7f-\x9f{_DIRECTION}]")
_UNSAFE_IN_JSON = re.compile(rf"[\x7f-\x9f\u2028\u2029\ud800-\udfff{_DIRECTION}]")


def plain(text: str) -> str:
    """Keep only what there is to read: no colours, no controls but tabs and newlines, surrogates as `\\udcff`."""
    lines = "\n".join(without_surrogates(text, "backslashreplace").splitlines())
    return _UNSAFE.sub("", _SEQUENCES.sub("", lines))


def without_surrogates(text: str, errors: str = "replace") -> str:
    """Return `text` as UTF-8 can hold it; by default of the same length."""
    return text.encode(errors=errors).decode()


def escaped(text: str, *, keep_lines: bool = False) -> str:
    """Return the text with everything unprintable as an escape; `keep_lines`: but for newlines and tabs."""
    if text.isprintable():
        return text
    kept = "\n\t" if keep_lines else ""
    signs = (
        sign if sign.isprintable() or sign in kept else sign.encode("unicode_escape").decode()
        for sign in text
    )
    return "".join(signs)


def json_text(value: object) -> str:
    """Return `value` as JSON that is readable and safe to show; what JSON does not know is written as its text."""
    text = json.dumps(value, default=str, ensure_ascii=False)
    # Outside of strings JSON has nothing of this, and within them these escapes mean the same.
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def one_line(text: str, length: int) -> str:
    """Return the words in one line of at most so many characters."""
    return cut(" ".join(text.split()), length)


def on_one_line(text: str) -> str:
    """Return the text with a space for everything unprintable."""
    return "".join(sign if sign.isprintable() else " " for sign in text)


def cut(text: str, length: int) -> str:
    """Return the text, with an ellipsis in place of what is beyond so many characters."""
    return text if len(text) <= length else f"{text[: length - 1]}…"


def duration(length_s: float) -> str:
    """Return a length of time in its two largest units, such as ``2 h 5 min`` or ``12.3 s``."""
    if length_s < 60:
        return f"{max(0.0, round(length_s, 2)):.3g} s"
    minutes, seconds = divmod(round(length_s), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    units = [(days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")]
    first = next(index for index, (number, _) in enumerate(units) if number)
    return " ".join(f"{number} {unit}" for number, unit in units[first : first + 2] if number)


def listed(names: Sequence[str], most: int) -> str:
    """Return the names for a sentence; of more than `most`, the first ones and how many follow."""
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return f"{', '.join(names[:most])}{more}"


def size_text(size_bytes: float) -> str:
    """Return a size in the unit that suits it, to three digits, such as `25 MB`."""
    for unit in ("B", "kB", "MB", "GB", "TB", "PB", "EB"):
        if size_bytes < 999.5 or unit == "EB":
            break
        size_bytes /= 1000
    return f"{size_bytes:.3g} {unit}"
