"""systemd's journal: an entry with fields for each line of the log, in the journal's own protocol.

With fields, ``journalctl ELASTIC_RUN=digits -p warning`` can filter the log. See "Native Journal Protocol" on
systemd.io; a line that the journal does not accept goes to stderr instead, which it reads too. While it hangs,
lines are lost: training is worth more.
"""

from __future__ import annotations

import json
import logging
import os
import re
import socket
import struct
from collections.abc import Mapping
from typing import Any, TextIO

from elastic_agent.logs.live import StatusLine
from elastic_agent.logs.render import CONTEXT_FIELDS, message_with_facts

ADDRESS = "/run/systemd/journal/socket"
IDENTIFIER = "elastic-agent"
PREFIX = "ELASTIC_"
LARGEST_BYTES = 48 * 1024
"""Of one field. A datagram holds some 200 KB; larger ones need a file, and no line of ours is worth that."""

PATIENCE_S = 0.5
"""How long the journal may take for a line."""

_PRIORITIES = {"debug": 7, "info": 6, "warning": 4, "error": 3, "critical": 2}
_NOT_IN_A_NAME = re.compile(r"[^A-Z0-9_]")
_LONGEST_NAME = 64


def is_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether what is written to ``stream`` goes to the journal: ``JOURNAL_STREAM`` names its device and inode."""
    try:
        found = os.fstat(stream.fileno())
    except (OSError, ValueError):  # closed, or no file at all
        return False
    return environ.get("JOURNAL_STREAM") == f"{found.st_dev}:{found.st_ino}"


def entry(fields: Mapping[str, Any]) -> bytes:
    """An event of the log as the datagram that journald takes."""
    rest = dict(fields)
    rest.pop("time")  # the journal has its own
    level = str(rest.pop("level"))
    message = message_with_facts({key: value for key, value in rest.items() if key not in CONTEXT_FIELDS})
    rest.pop("event")
    own = {"MESSAGE": message, "PRIORITY": _PRIORITIES[level], "SYSLOG_IDENTIFIER": IDENTIFIER}
    facts = {_name(key): value for key, value in rest.items() if value is not None}
    return b"".join(_field(name, str(value)) for name, value in {**facts, **own}.items())


def _name(key: str) -> str:
    return PREFIX + _NOT_IN_A_NAME.sub("_", key.upper())[: _LONGEST_NAME - len(PREFIX)]


def _field(name: str, value: str) -> bytes:
    data = value.encode(errors="backslashreplace")[:LARGEST_BYTES]
    if b"\n" in data:  # the lines would be parsed as fields
        return name.encode() + b"\n" + struct.pack("<Q", len(data)) + data + b"\n"
    return name.encode() + b"=" + data + b"\n"


class JournalHandler(logging.Handler):
    """Sends each record to the journal. Its formatter must give the event's fields as JSON."""

    def __init__(self, stream: TextIO, address: str = ADDRESS) -> None:
        super().__init__()
        self._lines = StatusLine(stream)
        self._address = address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_CLOEXEC)
        self._socket.settimeout(PATIENCE_S)

    def close(self) -> None:
        """Close the socket."""
        self._socket.close()
        super().close()

    def emit(self, record: logging.LogRecord) -> None:
        """Send it; as text to stderr if the journal does not take it."""
        try:
            text = self.format(record)
            try:
                self._socket.sendto(entry(json.loads(text)), self._address)
            except TimeoutError:
                pass  # stderr would lead to the same that hangs, and might hang for good
            except OSError:
                self._lines.write_line(text)
        except Exception:  # as logging's own handlers do: a log line may not end the program
            self.handleError(record)
