"""Names that no other test uses: agents of one machine find each other by the names of their runs."""

from __future__ import annotations

import secrets


def unique(prefix: str) -> str:
    """Return a name that begins with ``prefix``, such as a run id."""
    return f"{prefix}-{secrets.token_hex(4)}"
