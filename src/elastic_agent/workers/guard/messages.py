"""The messages between the agent's `Guard` and the guard process.

Two things are shared. A socket pair carries one JSON object per line in each direction; lines are small, so
neither side ever has reason to block on it. A memory file holds the deadline in its first eight bytes
(native order, nanoseconds of CLOCK_BOOTTIME, 0 = none), which the agent writes without a system call, and
from `MAILBOX_OFFSET` on the launches of the next generation as JSON: they contain whole environments, which
may be larger than a socket's buffer.

Both ends are the same version of the same package on the same machine, so no version is exchanged.
"""

from __future__ import annotations

import json

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    Message = dict[str, Any]

DEADLINE_BYTES = 8
MAILBOX_OFFSET = 4096
TAIL_BYTES = 32 * 1024
"""The size of the end of a worker's stderr output that is kept."""

NO_SLOT = -1
"""Slot of a `SpawnFailed` that concerns the whole generation."""


def encode(message: Message) -> bytes:
    return json.dumps(message, separators=(",", ":")).encode("ascii") + b"\n"


def decode(payload: bytes) -> Message:
    message: Message = json.loads(payload)
    return message


class LineBuffer:
    """Cuts a byte stream into messages."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[Message]:
        """Return the messages that `data` completes."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [decode(line) for line in lines]
