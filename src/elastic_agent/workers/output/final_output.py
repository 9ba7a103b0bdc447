"""Reads a worker's files after its end. May block as long as a file server hangs: not for an event loop."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field

from elastic_agent.workers.guard.line import TAIL_BYTES

_ERROR_FILE_BYTES = 1024 * 1024
_ROOM_BYTES = 16 * 1024
"""The error and the end of the output of a worker."""


@dataclass(frozen=True)
class FinalOutput:
    """The files of a worker and facts about its end, as far as they could be read."""

    error_file: str = ""
    """The content of the file that torch's `@record` writes."""
    stderr: str = ""
    """The last 32 KiB."""
    no_room: str = ""
    """The reason why nothing more can be written to its files, and where; empty if something can."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Observations of the machine that belong to its end; see :mod:`elastic_agent.workers.facts`."""


NOTHING_READ = FinalOutput()


def read_final_output(error_file: str, output: dict[str, str]) -> FinalOutput:
    """Read them.

    Args:
        error_file: where torch's `@record` writes; may be missing.
        output: the files that "stdout" and "stderr" go to, of those that go to one.
    """
    folders = {os.path.dirname(path) for path in output.values()}
    no_room = next(filter(None, map(_no_room_in, sorted(folders))), "")
    stderr = _read(output["stderr"], TAIL_BYTES, end=True) if "stderr" in output else ""
    return FinalOutput(_read(error_file, _ERROR_FILE_BYTES), stderr, no_room)


def _read(path: str, most_bytes: int, *, end: bool = False) -> str:
    """Return the beginning of a file, or its end; empty for anything but a file, such as a pipe without a writer."""
    try:
        with open(path, "rb", opener=_open_at_once) as file:
            known = os.fstat(file.fileno())
            if not stat.S_ISREG(known.st_mode):
                return ""
            file.seek(max(0, known.st_size - most_bytes) if end else 0)
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _open_at_once(path: str, flags: int) -> int:
    return os.open(path, flags | os.O_NONBLOCK | os.O_NOCTTY)


def _no_room_in(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_ROOM_BYTES))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{os.strerror(error.errno)}, see df {folder}"
    return ""
