"""What the coordinator waits for, as the nodes read it. Pure."""

from __future__ import annotations

import msgspec

from elastic_agent.printable import without_surrogates

LONGEST = 1000
"""Characters of a reason that are written."""

LONGEST_TEXT = 2048
"""Characters that a store keeps."""


class Waiting(msgspec.Struct, frozen=True, omit_defaults=True):
    """What the coordinator waits for."""

    reason: str = ""
    """In words; empty: nothing is known."""
    lacks_nodes: bool = False
    """Fewer nodes than required, or desired, have joined."""
    joined: tuple[str, ...] = ()
    """The ids of those that have, then; empty: they are too many to be written."""

    def to_text(self) -> str:
        """Return it as JSON, on one line."""
        waiting = msgspec.structs.replace(
            self, reason=without_surrogates(_on_one_line(self.reason[:LONGEST]))
        )
        text = msgspec.json.encode(waiting).decode()
        if len(text) <= LONGEST_TEXT:
            return text
        return msgspec.json.encode(msgspec.structs.replace(waiting, joined=())).decode()

    @classmethod
    def from_text(cls, text: str) -> Waiting:
        """Return what :meth:`to_text` made this of; any other text is the reason itself."""
        try:
            waiting = _DECODER.decode(text)
        except (msgspec.DecodeError, RecursionError):
            waiting = cls(text)
        return msgspec.structs.replace(waiting, reason=_on_one_line(waiting.reason))


_DECODER = msgspec.json.Decoder(Waiting)
"""Made now, by the one thread that imports, as in :mod:`.codec`."""


def _on_one_line(text: str) -> str:
    return "".join(char if char.isprintable() else " " for char in text)
