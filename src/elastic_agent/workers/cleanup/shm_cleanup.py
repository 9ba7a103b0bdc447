"""Files under /dev/shm that killed workers leave behind: found, attributed with care, removed.

A library removes its shared memory when its process exits normally, or has a helper process do it; when all of them
are killed at once, as happens to workers whose lease ran out, it stays. Such files occupy the machine's memory until
it is rebooted.

A file does not show which run made it, and several runs, even containers, may share /dev/shm. So a file is
removed only when all of this holds:

- its name is one that the libraries in `_NAMES` give, and it is a regular file of our user;
- it was not there when the generation began;
- it is one of the generation's: either its name has the number of one of the generation's processes, or such
  processes, and no others, held it (open or mapped) at the first sight of it. Numbers count only where those in
  names mean what they mean here, outside containers;
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
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from elastic_agent.linux import mapped_files, open_files, pid_namespace, process_name, processes_of

_NAMES = re.compile(
    "|".join(
        (
            # torch, file_system sharing: at::NewProcessWideShmHandle (aten/src/ATen/MapAllocator.cpp)
            r"torch_(?P<torch>\d+)_\d+_\d+",
            # LLVM and Intel OpenMP: __kmp_reg_status_name (openmp/runtime/src/kmp_runtime.cpp)
            r"__KMP_REGISTERED_LIB_(?P<kmp>\d+)_\d+",
            # joblib's loky: SemLock._make_name (loky/backend/synchronize.py); glibc puts "sem." before it
            r"sem\.loky-(?P<loky>\d+)-\w{8}",
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
_INITIAL_PID_NAMESPACE = "pid:[4026531836]"  # PROC_PID_INIT_INO, include/linux/proc_ns.h

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

    Args:
        folder: Where POSIX shared memory is.
        trust_pids: Whether process numbers in names are ours; None: if this is no container.
    """

    def __init__(self, folder: str = "/dev/shm", trust_pids: bool | None = None) -> None:
        self.folder = folder
        self._trust_pids = pid_namespace() == _INITIAL_PID_NAMESPACE if trust_pids is None else trust_pids
        self._before = frozenset(self._list())
        self._pids: set[int] = set()
        """Never 0, which stands for no number."""
        self._classified: set[_File] = set()
        """Files that have been seen."""
        self._made_here: set[_File] = set()
        """The seen files that only processes of the generation held at that time."""

    def belong(self, pids: Collection[int]) -> None:
        """Take note that these processes are, or were, the generation's."""
        self._pids |= {*pids}

    def note(self, pids: Collection[int]) -> None:
        """Attribute the files that were not there before; these processes are the generation's, and live.

        Reads their maps only when there is such a file.
        """
        self.belong(pids)
        present = {*self._list()}
        unseen = {file[0]: file for file in self._unseen(present)}
        held: set[str] = set()
        for pid in pids if unseen else ():
            with contextlib.suppress(OSError):
                held |= _held_names(pid) & {*unseen}
        if held:
            held -= self._held_by_others(held, {*pids})
        self._made_here |= {unseen[name] for name in held}
        self._classified = {file for file in self._classified if file in present} | {*unseen.values()}

    @property
    def has_unseen(self) -> bool:
        """True if there are files that are still to be attributed: `note` is due. Lists the folder once."""
        return any(True for _ in self._unseen(self._list()))

    def _unseen(self, present: Iterable[_File]) -> Iterator[_File]:
        for file in present:
            by_number = self._trust_pids and _pid_in(file[0]) in self._pids
            if not by_number and file not in self._before and file not in self._classified:
                yield file

    def _held_by_others(self, names: set[str], pids: set[int]) -> set[str]:
        """Return which of them a process of this user holds that is none of these; all, when that takes too long."""
        try:
            holders = _holders(names, time.monotonic() + _OTHERS_LIMIT_S, except_pids=pids)
            return {holder.file for holder in holders}
        except TimeoutError:
            return names

    def candidates(self) -> list[str]:
        """Return the names of files that the generation left, if no other process holds them. Lists the folder once."""
        return [name for name, inode in self._list() if self._is_ours((name, inode))]

    def sweep(self, timeout_s: float = 1.0) -> SweepReport:
        """Remove what the generation left; all its processes are gone."""
        names = {name for name in self.candidates() if self._is_removable(name)}
        if not names:
            return SweepReport()
        try:
            held = list(_holders(names, time.monotonic() + timeout_s))
        except TimeoutError:
            return SweepReport(unknown=tuple(sorted(names)))
        free = names - {holder.file for holder in held}
        return SweepReport(tuple(name for name in sorted(free) if self._remove(name)), tuple(held))

    def _list(self) -> Iterator[_File]:
        with contextlib.suppress(OSError), os.scandir(self.folder) as entries:
            for entry in entries:
                if _NAMES.fullmatch(entry.name):
                    yield entry.name, entry.inode()

    def _is_ours(self, file: _File) -> bool:
        if file in self._before:
            return False
        pid = _pid_in(file[0]) if self._trust_pids else 0
        if pid and os.path.exists(f"/proc/{pid}"):
            return False  # the number has been given to another process, which may have made this
        return file in self._made_here or pid in self._pids

    def _is_removable(self, name: str) -> bool:
        try:
            known = os.lstat(os.path.join(self.folder, name))
        except OSError:
            return False
        return stat.S_ISREG(known.st_mode) and known.st_uid == os.getuid()

    def _remove(self, name: str) -> bool:
        try:
            os.unlink(os.path.join(self.folder, name))
        except OSError:
            return False
        return True


def _pid_in(name: str) -> int:
    match = _NAMES.fullmatch(name)
    number = next(filter(None, match.groupdict().values()), None) if match is not None else None
    return int(number) if number is not None else 0


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
