"""Names for lives."""

from __future__ import annotations

import secrets


def new_incarnation() -> str:
    """A random name for one life of an agent (or of its place in the run, after a lost lease)."""
    return secrets.token_hex(8)
