"""Every decoder and parser of the package, with valid inputs."""

from __future__ import annotations

from tests.fuzz.target import Target

from . import files, records, settings, sockets, stored, system, texts


def all_targets() -> list[Target]:
    """All of them; those that use files and sockets are to be closed."""
    groups = (records, stored, sockets, files, settings, system, texts)
    return [target for group in groups for target in group.targets()]
