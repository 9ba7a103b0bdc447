"""The end of a worker: the guard's event, with what the worker wrote and what was observed of the machine."""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field, replace

from elastic_agent.diagnosis.records import GroupProgress
from elastic_agent.exit_note import Note
from elastic_agent.printable import plain
from elastic_agent.workers.failure import WorkerFailure, describe
from elastic_agent.workers.guard.client import Exited
from elastic_agent.workers.guard.line import TAIL_BYTES

_ERROR_FILE_BYTES = 1024 * 1024
_ROOM_BYTES = 16 * 1024
"""The error and the end of the output of a worker."""
_LONGEST_ERROR = 500
_AT_ONCE = os.O_NONBLOCK | os.O_NOCTTY


@dataclass(frozen=True)
class WorkerEnd(Exited):
    """A worker's end, as far as it is known: both the failure that nodes exchange and the report follow from it."""

    note: Note | None = None
    """The worker's note on the end of its script."""
    step: int = 0
    """The last step that it reported by a heartbeat; 0: none."""
    has_left: bool = False
    """It has saved and left after a notice."""
    progress: tuple[GroupProgress, ...] = ()
    """Its last collectives, if an exception ended its script or gloo aborted another worker; empty: not known."""
    is_read: bool = False
    """Its files were read, as far as that was possible."""
    error_file: str = ""
    """The content of the file that torch's `@record` writes."""
    no_room: str = ""
    """Why nothing more can be written to its files, and where; empty if something can."""
    facts: Mapping[str, str] = field(default_factory=dict)
    """Observations of the machine that belong to its end; see :mod:`elastic_agent.workers.facts`."""

    @property
    def errors(self) -> tuple[str, ...]:
        """Return the exception that ended the script ("": none) and those that led to it, the first cause last."""
        return tuple(plain(error)[:_LONGEST_ERROR] for error in self.note.errors) if self.note else ()

    def failure(self) -> WorkerFailure:
        """Describe how the worker failed."""
        noted = self.errors[0] if self.errors and not self.no_room else ""
        known = (self.error_file, self.stderr_tail, self.no_room, self.facts, noted)
        return describe(self.slot, self.returncode, *known)

    def with_files(self, error_file: str, output: Mapping[str, str]) -> WorkerEnd:
        """Return this end with what is in the worker's files. May block as long as a file server hangs.

        Args:
            error_file: the file that torch's `@record` writes; may be missing.
            output: the files that "stdout" and "stderr" go to, of those that go to one.
        """
        folders = {os.path.dirname(path) for path in output.values()}
        no_room = next(filter(None, map(_no_room_in, sorted(folders))), "")
        stderr = _read(output["stderr"], TAIL_BYTES, end=True) if "stderr" in output else ""
        return replace(
            self,
            is_read=True,
            error_file=_read(error_file, _ERROR_FILE_BYTES),
            stderr_tail=stderr or self.stderr_tail,
            no_room=no_room,
        )


def _read(path: str, most_bytes: int, *, end: bool = False) -> str:
    """Return the beginning of a file, or its end; empty for anything but a file, such as a pipe without a writer."""
    try:
        with open(path, "rb", opener=lambda name, flags: os.open(name, flags | _AT_ONCE)) as file:
            known = os.fstat(file.fileno())
            if not stat.S_ISREG(known.st_mode):
                return ""
            file.seek(max(0, known.st_size - most_bytes) if end else 0)
            return file.read(most_bytes).decode(errors="replace")
    except OSError:
        return ""


def _no_room_in(folder: str) -> str:
    try:
        with tempfile.TemporaryFile(dir=folder) as probe:
            probe.write(bytes(_ROOM_BYTES))
    except OSError as error:
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            return f"{os.strerror(error.errno)}, see df {folder}"
    return ""
