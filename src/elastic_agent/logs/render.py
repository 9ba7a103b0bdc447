"""The format of one log line: for the console, systemd's journal, or as JSON. Pure: from an event's fields to text."""

from __future__ import annotations

import json
from collections.abc import Mapping
from datetime import UTC, datetime
from typing import Any

from elastic_agent.printable import escaped, json_text

_CONTEXT_FIELDS = ("run", "node", "generation")

_ONLY_FOR_PROGRAMS = frozenset(
    {"kind", "cause", "check", "endpoint", "nodes", "world_size", "node_rank", "restarts", "runs"}
)
"""Values that programs filter by; for people, the message contains them."""

_LEVEL_COLOURS = {"debug": "2", "info": "32", "warning": "33", "error": "31", "critical": "31;1"}
_LEVEL_WIDTH = 7
_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_BLOCK_INDENT = "    "


def json_line(fields: Mapping[str, Any]) -> str:
    """Return a JSON object: time (ISO 8601, UTC), level, run, node, generation (or null), message, the rest.

    What JSON does not know is written as its text, what no terminal should see as an escape.
    """
    rest = dict(fields)
    when = datetime.fromtimestamp(rest.pop("time"), tz=UTC)
    line = {
        "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
        "level": rest.pop("level"),
        **{name: rest.pop(name, None) for name in _CONTEXT_FIELDS},
        "message": rest.pop("event"),
        **rest,
    }
    return json_text(line)


def console_line(fields: Mapping[str, Any], *, colours: bool) -> str:
    """Return ``12:00:00.123 info    [run node g3] message  key=value``, then values of several lines as blocks."""
    rest = dict(fields)
    when = datetime.fromtimestamp(rest.pop("time")).astimezone().strftime("%H:%M:%S.%f")[:-3]
    level = str(rest.pop("level"))
    context = _context(rest)
    parts = [
        _coloured(when, "2", colours),
        _coloured(level.ljust(_LEVEL_WIDTH), _LEVEL_COLOURS.get(level, ""), colours),
    ]
    if context:
        parts.append(_coloured(f"[{context}]", "36", colours))
    parts.append(_message_with_facts(rest, colours=colours))
    return " ".join(parts)


def journal_lines(fields: Mapping[str, Any]) -> str:
    """Return the lines of the console, each an entry of systemd's journal, after their priority: ``<4>``."""
    priority = _PRIORITIES.get(str(fields["level"]), _PRIORITIES["info"])
    return "\n".join(f"<{priority}>{line}" for line in console_line(fields, colours=False).split("\n"))


def _message_with_facts(fields: Mapping[str, Any], *, colours: bool) -> str:
    """Return ``message  key=value``, then values of several lines as blocks, without those only for programs."""
    rest = {key: value for key, value in fields.items() if key not in _ONLY_FOR_PROGRAMS}
    message = escaped(str(rest.pop("event")), keep_lines=True)
    blocks = {key: rest.pop(key) for key in list(rest) if "\n" in str(rest[key])}
    parts = [message.rstrip("\n").replace("\n", "\n" + _BLOCK_INDENT)]
    parts += [_coloured(f"{key}=", "2", colours) + _value(value) for key, value in rest.items()]
    return "\n".join([" ".join(parts), *(_block(key, str(value)) for key, value in blocks.items())])


def _context(rest: dict[str, Any]) -> str:
    run, node, generation = (rest.pop(name, None) for name in _CONTEXT_FIELDS)
    names = [str(word) for word in (run, node) if word is not None]
    if generation is not None:
        names.append(f"g{generation}")
    return escaped(" ".join(names))


def _value(value: object) -> str:
    if isinstance(value, float):
        return f"{value:.6g}"
    text = str(value)
    bare = text.isprintable() and text and not any(c in text for c in ' "=')
    return text if bare else json.dumps(escaped(text), ensure_ascii=False)


def _block(key: str, text: str) -> str:
    lines = escaped(text.strip("\n"), keep_lines=True).split("\n")
    return "\n".join([f"{_BLOCK_INDENT}{key}:", *(f"{_BLOCK_INDENT}  {line}" for line in lines)])


def _coloured(text: str, code: str, colours: bool) -> str:
    return f"\x1b[{code}m{text}\x1b[0m" if colours and code else text
