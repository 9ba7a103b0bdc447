"""The default directories of the agent's files."""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Mapping
from pathlib import Path

from elastic_agent.config.errors import UsageError, quoted
from elastic_agent.worker_variables import PREFIX


def default_state_dir(environ: Mapping[str, str]) -> Path:
    """Return the folder for what must outlive the agent.

    The one that ``ELASTIC_AGENT_STATE_DIR`` names, else the user's state folder, else a temporary one.
    """
    if named := environ.get(f"{PREFIX}STATE_DIR", ""):
        return Path(os.path.expanduser(named)).absolute()
    home = environ.get("HOME", "")
    base = environ.get("XDG_STATE_HOME", "")
    if not os.path.isabs(base):  # the XDG specification requires to ignore a relative one
        base = os.path.join(home, ".local", "state") if os.path.isabs(home) else ""
    if base:
        wanted = Path(base, "elastic-agent")
        if not problem_with_folder(wanted):
            return wanted
    return temporary_state_dir(environ)


def temporary_state_dir(environ: Mapping[str, str]) -> Path:
    """Return the fallback folder: per user, lost when the machine cleans its temporary files.

    It lies where every user may make files, so it is used only as :func:`make_state_dir` makes it.
    """
    base = environ.get("TMPDIR") or "/tmp"  # the tempfile module takes 10 ms to import
    return Path(os.path.abspath(base), f"elastic-agent-{os.getuid()}")


def make_state_dir(folder: Path, environ: Mapping[str, str]) -> None:
    """Make the fallback folder, for this user alone; any other is made by the first file in it.

    Raises:
        UsageError: it cannot be made, or another user could have put something into it.
    """
    if folder != temporary_state_dir(environ):
        return
    try:
        with contextlib.suppress(FileExistsError):
            os.mkdir(folder, 0o700)
        problem = problem_with_temporary(folder)
    except OSError as error:
        problem = f"which cannot be created: {error.strerror}"
    if problem:
        raise UsageError(
            f"--state-dir (by default): got {quoted(folder)}, {problem}", f"expected {OWN_FOLDER}"
        )


OWN_FOLDER = (
    "a directory that belongs to this user and is not writable by others: remove it, or set another "
    "--state-dir"
)


def problem_with_temporary(folder: Path) -> str:
    """Return why the fallback folder cannot be made or trusted, or an empty string. Touches nothing."""
    try:
        found = os.lstat(folder)
    except OSError:
        return problem_with_folder(folder)
    if not stat.S_ISDIR(found.st_mode):
        return "which is not a directory"
    if found.st_uid != os.geteuid():
        return f"which belongs to another user ({found.st_uid})"
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        return "which is writable by other users"
    return problem_with_folder(folder)


def default_log_dir(state_dir: Path) -> Path:
    """Return the folder for the workers' output."""
    return state_dir / "logs"


def problem_with_folder(folder: Path) -> str:
    """Return why ``folder`` cannot be written or made, or an empty string. Touches nothing."""
    for place in (folder, *folder.parents):
        if os.path.isdir(place):  # not Path.is_dir, which raises where a folder above may not be searched
            if not os.access(place, os.X_OK):
                return f"where {place} is not searchable by this user"
            return "" if os.access(place, os.W_OK) else f"where {place} is not writable by this user"
        if os.path.lexists(place):
            return f"where {place} is not a directory"
    return "which is not on any file system"


def _lacks_reader(file: Path) -> bool:
    """Return whether this is a FIFO that no program reads: opening it would wait for one."""
    try:
        if not stat.S_ISFIFO(os.stat(file).st_mode):
            return False
        os.close(os.open(file, os.O_WRONLY | os.O_NONBLOCK))
    except OSError as error:
        return error.errno == errno.ENXIO
    return False


def problem_with_file(file: Path) -> str:
    """Return why ``file`` cannot be written or made, or an empty string. Touches nothing."""
    if os.path.isdir(file):
        return "which is a directory"
    if _lacks_reader(file):
        return "which is a FIFO without a reader"
    if os.path.exists(file):
        return "" if os.access(file, os.W_OK) else "which is not writable by this user"
    return problem_with_folder(file.parent)
