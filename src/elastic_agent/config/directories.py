"""Where the agent keeps files when nobody says where."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """The folder for what must outlive the agent: the user's state folder, else a temporary one."""
    home = environ.get("HOME", "")
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification says to ignore a relative one
        base = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    if base:
        wanted = Path(base, "elastic-agent")
        if not problem_with_folder(wanted):
            return wanted
    return temporary_state_dir(environ)


def temporary_state_dir(environ: Mapping[str, str]) -> Path:
    """The folder of last resort: per user, lost when the machine cleans its temporary files."""
    base = environ.get("TMPDIR") or "/tmp"  # the tempfile module takes 10 ms to import
    return Path(base, f"elastic-agent-{os.getuid()}")


def default_log_dir(state_dir: Path) -> Path:
    """The folder for the workers' output."""
    return state_dir / "logs"


def problem_with_folder(folder: Path) -> str:
    """Why ``folder`` cannot be written or made, or an empty string. Touches nothing."""
    for place in (folder, *folder.parents):
        if place.is_dir():
            writable = os.access(place, os.W_OK | os.X_OK)
            return "" if writable else f"where {place} cannot be written by this user"
        if os.path.lexists(place):
            return f"where {place} is not a folder"
    return "which is on no file system"


def problem_with_file(file: Path) -> str:
    """Why ``file`` cannot be written or made, or an empty string. Touches nothing."""
    if file.is_dir():
        return "which is a folder"
    if file.exists():
        return "" if os.access(file, os.W_OK) else "which cannot be written by this user"
    return problem_with_folder(file.parent)
