"""Removes shared memory under /dev/shm that killed workers leave behind.

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
import re
import stat
import time
from collections.abc import Collection, Iterator
from dataclasses import dataclass

from elastic_agent.linux import mapped_files, open_files, process_name, processes_of

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
_OTHERS_LIMIT_S = 1.0

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
    unknown: tuple[str, ...] = ()
    """Files that stay, because it could not be determined in time whether a process holds them."""


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
            held -= self._held_by_others(held, {*pids})
        self._made_here |= {unseen[name] for name in held}

    @property
    def has_unseen(self) -> bool:
        """True if there are files that are still to be attributed: `note` is due. Lists the folder once."""
        return not self._list() <= self._seen

    def _held_by_others(self, names: set[str], pids: set[int]) -> set[str]:
        """Return which of them a process of this user holds that is none of these; all, when that takes too long."""
        try:
            holders = _holders(names, time.monotonic() + _OTHERS_LIMIT_S, except_pids=pids)
            return {holder.file for holder in holders}
        except TimeoutError:
            return names

    def candidates(self) -> list[str]:
        """Return the names of files that the generation left, if no other process holds them. Lists the folder once."""
        return sorted(name for name, _ in self._list() & self._made_here)

    def sweep(self, timeout_s: float = 1.0) -> SweepReport:
        """Remove what the generation left; all its processes are gone."""
        names = {*self.candidates()}
        if not names:
            return SweepReport()
        try:
            held = list(_holders(names, time.monotonic() + timeout_s))
        except TimeoutError:
            return SweepReport(unknown=tuple(sorted(names)))
        free = names - {holder.file for holder in held}
        return SweepReport(tuple(name for name in sorted(free) if self._remove(name)), tuple(held))

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


def _holders(names: set[str], deadline_s: float, except_pids: Collection[int] = ()) -> Iterator[Held]:
    """Yield which processes of this user hold which of these, as far as they may be inspected.

    Raises:
        TimeoutError: the deadline (of the monotonic clock) passed before all were inspected.
    """
    for pid in processes_of(os.getuid()):
        if pid in except_pids:
            continue
        if time.monotonic() > deadline_s:
            raise TimeoutError
        try:
            found = _held_names(pid) & names
        except OSError:
            continue  # it ended meanwhile, or has more privileges: not a worker
        yield from (Held(name, pid, process_name(pid)) for name in sorted(found))


def _held_names(pid: int) -> set[str]:
    """Return the last parts of the paths of all files that a process has open or mapped.

    Only their names: the folder may have another path in another mount namespace. Raises OSError.
    """
    return {path.rpartition("/")[2] for path in open_files(pid)} | {*mapped_files(pid)}
