"""The file through which a worker and its agent communicate: its layout, and both sides.

One file per node and generation, one cell per slot. Slot *s* has the 128 bytes (two cache lines, so that
workers do not slow each other down) from byte ``128 * s``, as 64-bit words in the machine's own byte order:

    word 0   beats: how often the worker reported; 0 = never; any change means progress
    word 1   step: the last step it reported, with a beat or without; 0 until it reports one
    word 2   notice: the serial number of the newest notice; 0 = none. The agent writes this and the next two
    word 3   its cause, as a number: 1 and up in the order of ``CAUSES``
    word 4   when workers are stopped, in nanoseconds of CLOCK_BOOTTIME
    word 5   handles notices: 1 once the worker has checked for notices
    word 6   left: the serial number of the notice after which the worker has saved and left
    word 7   wants a cold start: 1 once something that the script did came too late for what was preloaded
    word 8   optimizer steps that were counted since the worker's start; 0: none, or not known

Behind the cells, each slot has room for a note, which its worker writes when its script ends
(:mod:`elastic_agent.exit_note`).

The worker stores the step before the beats, the agent a notice's serial number last, each as one aligned word: no
half-written number is ever read. Several together are no snapshot: beside a given count of beats a later step may
already stand.

A cell has at most one writer: the first process that claims it, until that process ends. The claim is a
POSIX record lock on the cell's bytes, as that is not inherited by fork and vanishes with its holder.
"""

from __future__ import annotations

import fcntl
import mmap
import os

from elastic_agent.client._notice import CAUSE, CAUSES, DEADLINE_NS, LEFT, LOOKS, NOTICE
from elastic_agent.exit_note import CELL_BYTES, NOTE_BYTES, OPTIMIZER_STEPS, WANTS_COLD, Note, read_note

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Collection

PREFIX, SUFFIX = "elastic-agent.", ".beat"
"""The beginning and the end of a file's name; what stands between them is random."""

SLOT_BYTES = CELL_BYTES + NOTE_BYTES
"""In the file: a cell and a note."""
WORD_BYTES = 8
CELL_WORDS = CELL_BYTES // WORD_BYTES
BEATS = 0
STEP = 1

_ENOSPC = 28  # errno is one more module to load
_AGENT_LOCK = 1 << 40


class HeartbeatFile:
    """The agent's side: makes the file and reads what the workers wrote."""

    def __init__(self, path: str, fd: int, size: int) -> None:
        self.path = path
        """Its place; workers get this as ELASTIC_AGENT_HEARTBEAT."""
        self.slots = size // SLOT_BYTES
        """The number of its cells."""
        self._fd = fd
        self._memory = mmap.mmap(fd, size)
        self._words = memoryview(self._memory).cast("q")
        self._steps_before: dict[int, int] = {}
        """The optimizer steps that workers which are kept made in earlier generations."""

    @classmethod
    def create(cls, folder: str | os.PathLike[str], slots: int) -> HeartbeatFile:
        """Make a file in ``folder``, readable by its owner only, with an empty cell for each of ``slots`` workers.

        Its name cannot be guessed: in a directory where every user may make files, no other user can have made it
        before. Raises OSError when the file cannot be made.
        """
        path, fd = _make_locked(os.fspath(folder))
        size = slots * SLOT_BYTES
        try:
            # Written, not merely truncated to size: a hole would first need its space when a worker
            # beats, and on a full disk kill it there with SIGBUS.
            if os.write(fd, bytes(size)) != size:
                raise OSError(_ENOSPC, os.strerror(_ENOSPC), path)
            return cls(path, fd, size)
        except BaseException:
            os.unlink(path)
            os.close(fd)
            raise

    def notify(self, serial: int, cause: str, deadline_ns: int) -> None:
        """Give every worker this notice; ``deadline_ns`` is in nanoseconds of CLOCK_BOOTTIME.

        Raises:
            ValueError: there is no such cause, or the file was closed.
        """
        for slot in range(self.slots):
            first = slot * CELL_WORDS
            self._words[first + CAUSE] = CAUSES.index(cause) + 1
            self._words[first + DEADLINE_NS] = deadline_ns
            self._words[first + NOTICE] = serial

    def begin_anew(self, kept: Collection[int]) -> None:
        """Forget the notices of a generation, and all of its workers but for those in the slots that are kept.

        Of these, forget what they have reported: it is no progress of the next generation.

        Raises:
            ValueError: the file was closed.
        """
        data = self._words.cast("B")
        self._steps_before = {slot: self._words[slot * CELL_WORDS + OPTIMIZER_STEPS] for slot in kept}
        for slot in range(self.slots):
            first = slot * CELL_WORDS
            self._words[first + NOTICE] = self._words[first + BEATS] = self._words[first + STEP] = 0
            if slot not in kept:
                note = self.slots * CELL_BYTES + slot * NOTE_BYTES
                data[slot * CELL_BYTES : (slot + 1) * CELL_BYTES] = bytes(CELL_BYTES)
                data[note : note + NOTE_BYTES] = bytes(NOTE_BYTES)

    def handles_notices(self, slot: int) -> bool:
        """Return whether the worker has checked for notices."""
        return self._words[slot * CELL_WORDS + LOOKS] != 0

    def left(self, slot: int) -> bool:
        """Return whether the worker reported that it saved and leaves after a notice."""
        return self._words[slot * CELL_WORDS + LEFT] != 0

    def wants_cold(self, slot: int) -> bool:
        """Return whether something that the worker's script did came too late for what was preloaded."""
        return self._words[slot * CELL_WORDS + WANTS_COLD] != 0

    def read(self, slot: int) -> tuple[int, int]:
        """Return ``(beats, step)`` of ``slot`` as of now; (0, 0) while its worker has never reported.

        The numbers come from user code's process: compare ``beats`` with what it was, trust neither.
        Raises ValueError when the file was closed.
        """
        first = slot * CELL_WORDS
        return self._words[first + BEATS], self._words[first + STEP]

    def optimizer_steps(self, slot: int) -> int:
        """Return how many optimizer steps of the worker were counted in this generation; 0: none, or not known."""
        return max(0, self._words[slot * CELL_WORDS + OPTIMIZER_STEPS] - self._steps_before.get(slot, 0))

    def note(self, slot: int) -> Note | None:
        """Return what the worker noted when its script ended; None: it did not, or could not.

        Raises:
            ValueError: the file was closed.
        """
        start = self.slots * CELL_BYTES + slot * NOTE_BYTES
        return read_note(bytes(self._words.cast("B")[start : start + NOTE_BYTES]))

    def close(self) -> None:
        """Close the file and remove it. Repeatable.

        Workers that have it open are not affected.
        """
        self._words.release()
        if self._memory.closed:
            return
        self._memory.close()
        try:
            os.unlink(self.path)
        except FileNotFoundError:
            pass
        finally:
            os.close(self._fd)


def _make_locked(folder: str) -> tuple[str, int]:
    """Make a new empty file; return its path and a descriptor that holds the agent's lock on it. Raises OSError."""
    while True:
        path = os.path.join(folder, f"{PREFIX}{os.urandom(8).hex()}{SUFFIX}")
        fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        if lock_as_agent(fd) and os.fstat(fd).st_nlink:
            return path, fd
        os.close(fd)  # before it was locked another agent took it for abandoned


def lock_as_agent(fd: int) -> bool:
    """Lock a heartbeat file as its agent does; False if another process has that lock. Raises OSError.

    The lock vanishes with its holder, or when that closes the file. It lies beyond all cells, as their claims are
    locks too.
    """
    try:
        fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, _AGENT_LOCK)
    except (BlockingIOError, PermissionError):
        return False
    return True


def claim_cell(path: str, slot: int) -> memoryview | None:
    """Return ``slot``'s cell as 64-bit words for the worker to store to, or None if another process has it.

    The claim lasts until this process ends or executes another program.

    Raises:
        OSError: the file cannot be opened, locked or mapped.
        ValueError: it has no such slot.
    """
    fd = os.open(path, os.O_RDWR)
    start = slot * CELL_BYTES
    claimed = False
    try:
        size = os.fstat(fd).st_size
        if slot >= size // SLOT_BYTES:
            raise ValueError(f"{path} is {size} bytes long, too short for slot {slot}")
        try:
            fcntl.lockf(fd, fcntl.LOCK_EX | fcntl.LOCK_NB, CELL_BYTES, start)
        except (BlockingIOError, PermissionError):
            return None
        words = memoryview(mmap.mmap(fd, size))[start : start + CELL_BYTES].cast("q")
        claimed = True
        return words
    finally:
        # Once claimed it stays open for good: closing it would give the lock back.
        if not claimed:
            os.close(fd)
