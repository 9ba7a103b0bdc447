"""What workers wrote, and what is shown of it: errors of torch, tracebacks, lines of logs."""

from __future__ import annotations

from elastic_agent.diagnosis.known_errors import known_error, possible_error, readable
from elastic_agent.logs.render import console_line, journal_lines, json_line
from elastic_agent.printable import escaped, json_text, plain, without_surrogates
from elastic_agent.workers.failure import describe
from tests.fuzz.target import Target, check_shown

from . import support


def targets() -> list[Target]:
    """Bytes are read with a replacement, as the guard does, or as surrogates, as Python does with file names."""
    errors = (support.TRACEBACK.encode(), support.OTHER_ERRORS.encode())
    shown = (b"\x1b]0;title\x07\x1b[31mred\x1b[0m\ttab\nline \xe2\x80\xae", "é\u009b31m\u2028".encode())
    return [
        Target("stderr", errors, _stderr, weight=0.2, slow_s=0.5),
        Target("torch-errors", errors, _known, weight=0.3),
        Target("shown-text", shown, _shown, slow_s=0.5),
        Target("log-line", shown, _log_line, weight=0.3, slow_s=0.5),
    ]


def _stderr(data: bytes) -> None:
    text = data.decode(errors="replace")
    for code in (1, -6, -9, -15):
        failure = describe(0, code, "", text)
        check_shown(failure.summary("n0"))
        check_shown(failure.tail)
        check_shown(failure.message)


def _known(data: bytes) -> None:
    text = data.decode(errors="replace")
    known_error(text, text)
    possible_error(text)
    readable(text)


def _shown(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    check_shown(plain(text))
    check_shown(escaped(text, keep_lines=True))
    check_shown(escaped(text))
    check_shown(json_text({"a": text, text: [text]}))
    without_surrogates(text).encode()


def _log_line(data: bytes) -> None:
    text = data.decode(errors="surrogateescape")
    fields = {
        "time": 1.7e9,
        "level": "info",
        "run": "run",
        "node": text,
        "generation": 1,
        "event": text,
        "what": text,
        "x": [text],
    }
    check_shown(json_line(fields))
    check_shown(console_line(fields, colours=False))
    check_shown(journal_lines(fields))
