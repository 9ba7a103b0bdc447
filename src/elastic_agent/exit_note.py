"""The note that a worker writes when its script ends: when, with which exit code, and the exceptions that led to it.

A Python program needs up to half a second to end after an exception or ``sys.exit``. Only then its connections break,
and only then its agent sees that it has ended. If another worker is killed meanwhile, the agent stops this one. The
note tells what happened first, and that an exception was raised while another one was handled, also where a traceback
does not show it (``raise … from None``, ``sys.exit(1)`` or ``os._exit(1)`` in a handler).

The notes are behind the cells of the heartbeat file (:mod:`elastic_agent.client._cells`), :data:`NOTE_BYTES` for each
slot: eight bytes in the machine's own byte order, which are the microseconds of CLOCK_BOOTTIME times 256 plus the exit
code, and up to three lines of UTF-8, filled up with zeros. The standard library alone is used, and little of it.

While its script runs, a warm worker may also note that the next one is to start cold.
"""

import os
import sys
import time

from elastic_agent.worker_variables import HEARTBEAT, SLOT

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Mapping
    from typing import NoReturn

CELL_BYTES = 128
"""The size of a cell of the heartbeat file."""
NOTE_BYTES = 1024
UNKNOWN_CODE = 255
"""Stands for an exit code that is not known, and for 255 itself."""

WANTS_COLD = 7
"""The word of a worker's cell in the heartbeat file by which it asks for a cold start next time."""

OPTIMIZER_STEPS = 8
"""The word with the optimizer steps that were counted since the worker's start; 0: none, or not known."""

_HEAD_BYTES = 8
_MOST_LINES = 3
_MOST_LINKS = 20
_LINE_BYTES = (NOTE_BYTES - _HEAD_BYTES) // _MOST_LINES - 1


class Writer:
    """The note of this process, and of none that it forks."""

    def __init__(self, path: str, slot: int) -> None:
        """Write to the heartbeat file at ``path``."""
        self._path = path
        self._slot = slot
        self._pid = os.getpid()

    @classmethod
    def of_worker(cls, environ: "Mapping[str, str]") -> "Writer | None":
        """Return the note of the worker with these variables; None outside of an agent."""
        path, slot = environ.get(HEARTBEAT), environ.get(SLOT, "")
        return cls(path, int(slot)) if path and slot.isdecimal() else None

    def write(self, error: BaseException | None, code: int | None) -> None:
        """Note that the script ends now, with this exception and exit code (None: not known). Never raises.

        Only the first note of a worker counts.
        """
        try:
            moment = time.clock_gettime_ns(time.CLOCK_BOOTTIME) // 1000
            if os.getpid() != self._pid:
                return
            head = (moment << 8) + (UNKNOWN_CODE if code is None else code & 255)
            # Not closed: that would release the claim on the cell that this process may hold.
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)
            size = os.fstat(fd).st_size
            slots = size // (CELL_BYTES + NOTE_BYTES)
            start = slots * CELL_BYTES + self._slot * NOTE_BYTES
            if self._slot < slots and not any(os.pread(fd, _HEAD_BYTES, start)):
                os.pwrite(fd, head.to_bytes(_HEAD_BYTES, sys.byteorder) + _text_of(error), start)
        except Exception:  # never the script's problem, even if an exception cannot be printed
            pass

    def want_cold(self) -> None:
        """Ask for a cold start of the next worker. Never raises."""
        try:
            fd = os.open(self._path, os.O_RDWR | os.O_CLOEXEC)  # not closed, as above
            if self._slot < os.fstat(fd).st_size // (CELL_BYTES + NOTE_BYTES):
                os.pwrite(fd, (1).to_bytes(8, sys.byteorder), self._slot * CELL_BYTES + 8 * WANTS_COLD)
        except Exception:  # the next one says again what it could not do
            pass


def note_immediate_exits(note: Writer) -> None:
    """Have ``os._exit`` write the note of this process before it ends it, as nothing else is called any more."""
    end = os._exit

    def _exit(status: int) -> "NoReturn":
        """Exit to the system with specified status, without normal exit processing."""
        error = SystemExit(status)
        error.__context__ = sys.exc_info()[1]
        note.write(error, exit_code(error))
        end(status)

    os._exit = _exit


def exit_code(error: BaseException | None) -> int | None:
    """Return the code with which Python exits because of this exception; None: by a signal."""
    if error is None:
        return 0
    if isinstance(error, KeyboardInterrupt):
        return None
    if not isinstance(error, SystemExit):
        return 1
    if error.code is None:
        return 0
    return error.code if isinstance(error.code, int) else 1


def _text_of(error: BaseException | None) -> bytes:
    chain: list[BaseException] = []
    while error is not None and error not in chain and len(chain) < _MOST_LINKS:
        chain.append(error)
        error = error.__cause__ or error.__context__
    shown = chain if len(chain) <= _MOST_LINES else [chain[0], *chain[1 - _MOST_LINES :]]
    return b"\n".join(one_line(cause).encode(errors="replace")[:_LINE_BYTES] for cause in shown)


def one_line(error: BaseException) -> str:
    """Return the exception as the last line of a traceback shows it, its message on one line."""
    if isinstance(error, SystemExit):
        return " ".join(error.code.split()) if isinstance(error.code, str) else ""
    kind = type(error)
    module = "" if kind.__module__ in ("builtins", "__main__") else f"{kind.__module__}."
    text = " ".join(str(error).split())
    return f"{module}{kind.__qualname__}: {text}" if text else f"{module}{kind.__qualname__}"


class Note:
    """A note that was read. It comes from the process of user code: it may contain anything."""

    __slots__ = ("at_boottime_s", "code", "errors")

    def __init__(self, at_boottime_s: float, code: int | None, errors: tuple[str, ...]) -> None:
        self.at_boottime_s = at_boottime_s
        self.code = code
        """None: not known."""
        self.errors = errors
        """The exception that ended the script, empty if none did, and those that led to it; the first cause last."""


def read_note(data: bytes) -> Note | None:
    """Return the note in these bytes; None if there is none."""
    head = int.from_bytes(data[:_HEAD_BYTES], sys.byteorder)
    if not head:
        return None
    text = data[_HEAD_BYTES:].partition(b"\0")[0].decode(errors="replace")
    code = head & 255
    return Note(
        (head >> 8) / 1e6, None if code == UNKNOWN_CODE else code, tuple(text.split("\n")[:_MOST_LINES])
    )
