"""Removes what a generation's workers left, before the next one starts: above all shared memory under /dev/shm.

A thread does what may take long: inspecting what the processes hold while they live, which is the only time it can
be seen, and removing it when they are gone.

A library removes its shared memory when its process exits normally, or has a helper process do it; when all of them
are killed at once, as happens to workers whose lease ran out, it stays. Such files occupy the machine's memory until
it is rebooted.

A file does not show which run made it, and several runs, even containers, may share /dev/shm. So a file is
removed only when all of this holds:

- its name is one that the libraries in `_NAMES` give, and it is a regular file of our user;
- it was not there when the generation began;
- processes of the generation, and no others, held it (open or mapped) at the first inspection that found it;
- all processes of the generation are gone, and no other process that can be seen here holds it.

A file that no process holds may well be in use: shared memory can be made, closed and attached to again,
and a tensor on its way from one process to another is held by neither. Therefore "no process holds it" alone is no
reason to remove anything, and neither is that a worker holds it now: another program may have made it, closed it
and handed it over. A file that is handed over before the first inspection is taken for the worker's.
"""

from __future__ import annotations

import contextlib
import os
import queue
import re
import stat
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from dataclasses import dataclass

from elastic_agent import linux

INSPECT_EVERY_S = 5.0
"""Pause between two inspections of what the processes hold."""

CLEANUP_LIMIT_S = 2.0
"""The next generation does not wait longer."""

_NAMES = re.compile(
    "|".join(
        (
            # torch, file_system sharing: at::NewProcessWideShmHandle (aten/src/ATen/MapAllocator.cpp)
            r"torch_\d+_\d+_\d+",
            # joblib's loky: SemLock._make_name (loky/backend/synchronize.py); glibc puts "sem." before it
            r"sem\.loky-\d+-\w{8}",
            # Python: SemLock._make_name (multiprocessing/synchronize.py), where processes are not forked
            r"sem\.mp-\w{8}",
            # Python: _make_filename (multiprocessing/shared_memory.py)
            r"psm_[0-9a-f]{8}",
            # NCCL: ncclShmOpen (src/misc/shmutils.cc)
            r"nccl-[A-Za-z0-9]{6}",
            # mosaicml-streaming: _get_path (streaming/base/shared/prefix.py)
            r"\d{6}_[a-z_]+",
            # CUDA's driver, for memory shared between processes; its source is not public
            r"cuda\.shm\.[0-9a-f]+(\.[0-9a-f]+)+",
        )
    )
)
_File = tuple[str, int]
"""A file's name and inode number; tmpfs gives no number twice."""


@dataclass(frozen=True)
class Held:
    """A file that stays, because this process has it open or mapped."""

    file: str
    pid: int
    process: str


@dataclass(frozen=True)
class SweepReport:
    """The result for the files that a generation left."""

    removed: tuple[str, ...] = ()
    held: tuple[Held, ...] = ()


class SharedMemorySweep:
    """Removes what one generation's processes leave; made before they are started.

    Never raises for what vanishes or may not be read; never follows a link.
    """

    def __init__(self, folder: str = "/dev/shm") -> None:
        """``folder``: where POSIX shared memory is."""
        self.folder = folder
        self._before = self._list()
        self._seen = self._before
        """Files that were there before, or at the last inspection."""
        self._made_here: set[_File] = set()
        """Files that only processes of the generation held when they were first seen."""

    def note(self, pids: Collection[int]) -> None:
        """Attribute the files that are new; these processes are all of the generation's, and live."""
        present = self._list()
        unseen = {file[0]: file for file in present - self._seen}
        self._seen = self._before | present
        held: set[str] = set()
        for pid in pids if unseen else ():
            with contextlib.suppress(OSError):
                held |= _held_names(pid) & {*unseen}
        if held:
            held -= {holder.file for holder in _holders(held, except_pids={*pids})}
        self._made_here |= {unseen[name] for name in held}

    @property
    def has_unseen(self) -> bool:
        """True if there are files that are still to be attributed: `note` is due. Lists the folder once."""
        return not self._list() <= self._seen

    def candidates(self) -> list[str]:
        """Return the names of files that the generation left, if no other process holds them. Lists the folder once."""
        return sorted(name for name, _ in self._list() & self._made_here)

    def sweep(self) -> SweepReport:
        """Remove what the generation left; all its processes are gone."""
        names = {*self.candidates()}
        held = (*_holders(names),) if names else ()
        free = names - {holder.file for holder in held}
        return SweepReport(tuple(name for name in sorted(free) if self._remove(name)), held)

    def _list(self) -> set[_File]:
        """Return the regular files of this user that the libraries may have made."""
        found: set[_File] = set()
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAMES.fullmatch(entry.name):
                    with contextlib.suppress(FileNotFoundError):  # it was removed meanwhile
                        known = entry.stat(follow_symlinks=False)
                        if stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid():
                            found.add((entry.name, known.st_ino))
        return found

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(os.path.join(self.folder, name))
        except OSError:
            return False
        return True


def _holders(names: set[str], except_pids: Collection[int] = ()) -> Iterator[Held]:
    """Yield which processes of this user hold which of these, as far as they may be inspected."""
    for pid in linux.processes_of(os.getuid()):
        if pid in except_pids:
            continue
        try:
            found = _held_names(pid) & names
        except OSError:
            continue  # it ended meanwhile, or has more privileges: not a worker
        yield from (Held(name, pid, linux.process_name(pid)) for name in sorted(found))


def _held_names(pid: int) -> set[str]:
    """Return the last parts of the paths of all files that a process has open or mapped.

    Only their names: the folder may have another path in another mount namespace. Raises OSError.
    """
    return {path.rpartition("/")[2] for path in linux.open_files(pid)} | {*linux.mapped_files(pid)}


class Cleanup:
    """The cleanup after one generation. Made before its processes are started, used up when it is cleared."""

    def __init__(self, guard_pid: int, sweep: SharedMemorySweep | None = None) -> None:
        """``guard_pid``: of the process from which all of the generation descend; ``sweep``: of /dev/shm."""
        self._guard_pid = guard_pid
        self._sweep = sweep or SharedMemorySweep()
        self._has_started = False
        self._files: frozenset[str] = frozenset()
        self._jobs: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()

    def for_next(self) -> Cleanup:
        """Return that of the next generation, in which processes of this one go on: it removes what both leave."""
        return Cleanup(self._guard_pid, self._sweep)

    def started(self) -> None:
        """Begin to inspect, from time to time, what the processes of the workers hold."""
        self._has_started = True
        threading.Thread(target=self._run, name="cleanup", daemon=True).start()

    def inspect(self) -> None:
        """Inspect what the processes hold that are about to be stopped, while they still do."""
        self._jobs.put(self._inspect)

    def remove(self, files: Iterable[str]) -> None:
        """Have these files removed too when it is cleared; they may be on a file server."""
        self._files = frozenset(files)

    @property
    def nothing_to_do(self) -> bool:
        """True if all processes are gone and nothing is to be removed. Fast: it lists /dev/shm once."""
        return not self._has_started or not (self._files or self._sweep.candidates())

    def clear(self, done: Callable[[SweepReport], None], unkillable: Collection[int] = ()) -> None:
        """Remove what is left, and call `done` from the thread. `unkillable`: processes that stay."""
        until_s = time.monotonic() + CLEANUP_LIMIT_S
        self._jobs.put(lambda: done(self._cleared({*unkillable}, until_s)))
        self.close()

    def close(self) -> None:
        """End the thread: there is nothing more to do."""
        self._jobs.put(None)

    def _run(self) -> None:
        while True:
            try:
                job = self._jobs.get(timeout=INSPECT_EVERY_S)
            except queue.Empty:
                job = self._inspect
            if job is None:
                return
            job()

    def _inspect(self) -> None:
        if self._sweep.has_unseen:
            self._sweep.note(linux.family(self._guard_pid))

    def _cleared(self, unkillable: set[int], until_s: float) -> SweepReport:
        for file in self._files:
            if time.monotonic() < until_s:  # later, it may be the next generation's
                with contextlib.suppress(OSError):
                    os.unlink(file)
        report = self._sweep.sweep()
        if not report.held:
            return report
        # The spawner and its standbys are no generation's: what they hold is neither left nor in the way.
        waiting = {process.pid for process in linux.descendants(self._guard_pid)} - unkillable
        return SweepReport(report.removed, tuple(held for held in report.held if held.pid not in waiting))
