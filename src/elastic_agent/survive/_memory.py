"""The two copies of a worker's state, in memory that its agent holds: they outlive the worker's process.

Each of two files without a name (memfd) begins with a header, which is invalid while the rest is written: a copy that
was not completed is never used, and the other one still is.
"""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from elastic_agent import client, linux
from elastic_agent.survive._packing import Packed
from elastic_agent.worker_variables import STATE_MEMORY

_LAYOUT = struct.Struct("<8sQqQQ32sq")
_COMPLETE = b"survive1"
_HEADER_SIZE = mmap.PAGESIZE
"""The rest begins on a page of its own."""
_USABLE_SHARE = 0.9


class Copy(NamedTuple):
    """A complete copy, as its header describes it."""

    path: str
    serial: int
    """Grows with each copy."""
    step: int
    size: int
    """Bytes of the state."""
    skeleton_size: int
    identity: bytes
    """Names the training that the state belongs to, in 32 bytes."""
    used: int = -1
    """What :meth:`Memory.use` noted; -1: nothing."""


class Memory:
    """The copies of one training."""

    def __init__(self, paths: list[str], identity: bytes, workers: int) -> None:
        """Use the files at ``paths``; so many workers share the machine's memory. OSError: a file is not there."""
        self._paths = paths
        self._identity = identity
        self._workers = workers
        self._areas: dict[str, Tensor] = {}
        self._copies()

    @classmethod
    def of_worker(cls, identity: bytes, workers: int) -> Memory | None:
        """Return the memory that the agent gave this process, which is no child of its worker; None: it gave none."""
        value = os.environ.get(STATE_MEMORY)
        return cls(value.split(":"), identity, workers) if value and client.is_monitored() else None

    def newest(self) -> Copy | None:
        """Return the newest complete copy of this training."""
        own = [found for found in self._copies() if found.identity == self._identity]
        return max(own, key=lambda found: found.serial, default=None)

    def belongs_to_another(self) -> bool:
        """Return whether it holds the state of another training."""
        return any(found.identity != self._identity for found in self._copies())

    def clear(self) -> None:
        """Forget what it holds, and give back the space."""
        for path in self._paths:
            with _opened(path) as file:
                linux.punch_hole(file, 0, os.fstat(file).st_size + mmap.PAGESIZE)  # with the whole last page

    def view(self, found: Copy) -> Tensor:
        """Return the bytes of a copy, which are not copied."""
        return self._area(found.path, found.size)

    def use(self, found: Copy, note: int) -> None:
        """Note that this copy is used, and give back the space of the other one, which is older."""
        for path in self._paths:
            with _opened(path) as file:
                if path == found.path:
                    os.pwrite(file, _LAYOUT.pack(_COMPLETE, *found[1:-1], note), 0)
                else:
                    linux.punch_hole(file, 0, os.fstat(file).st_size + mmap.PAGESIZE)

    def write(self, step: int, packed: Packed) -> None:
        """Replace the older copy. MemoryError: there is no room for two; OSError: another training has the memory."""
        with self.replacing(step, packed.size, len(packed.skeleton)) as area:
            packed.write_to(area)

    @contextlib.contextmanager
    def replacing(self, step: int, size: int, skeleton_size: int) -> Iterator[Tensor]:
        """Give the place of the older copy to write to; it is complete when the block ends. Raises as ``write``."""
        if self.belongs_to_another():
            raise OSError("another training of this worker uses the memory")
        serials = {found.path: found.serial for found in self._copies()}
        path = min(self._paths, key=lambda each: serials.get(each, 0))
        with _opened(path) as file:
            os.pwrite(file, bytes(_LAYOUT.size), 0)
        self._make_room(size + _HEADER_SIZE)
        yield self._area(path, size)
        serial = 1 + max(serials.values(), default=0)
        with _opened(path) as file:
            os.pwrite(file, _LAYOUT.pack(_COMPLETE, serial, step, size, skeleton_size, self._identity, -1), 0)

    def _copies(self) -> list[Copy]:
        found = []
        for path in self._paths:
            with _opened(path) as file:
                data, length = os.pread(file, _LAYOUT.size, 0), os.fstat(file).st_size
            mark, *fields = _LAYOUT.unpack(data.ljust(_LAYOUT.size, b"\0"))
            copy = Copy(path, *fields)
            if mark == _COMPLETE and copy.skeleton_size <= copy.size <= length - _HEADER_SIZE:
                found.append(copy)
        return found

    def _make_room(self, length: int) -> None:
        # By blocks: a file that was cleared keeps its length.
        missing = sum(max(0, length - os.stat(path).st_blocks * 512) for path in self._paths) * self._workers
        if missing and missing > (available := available_bytes()) * _USABLE_SHARE:
            raise MemoryError(
                f"two copies of each worker's state need {missing / 1e6:.0f} MB more, {available / 1e6:.0f} MB are free"
            )
        for path in self._paths:
            os.truncate(path, max(length, os.stat(path).st_size))

    def _area(self, path: str, size: int) -> Tensor:
        if path not in self._areas or len(self._areas[path]) < size:
            # Such a mapping has no descriptor, which a script could close.
            whole = torch.from_file(path, shared=True, size=_HEADER_SIZE + size, dtype=torch.uint8)
            self._areas[path] = whole[_HEADER_SIZE:]
        return self._areas[path][:size]


def available_bytes(root: str = "/") -> int:
    """Return how much memory this process may still take: the machine's, or less by a limit of its cgroups."""
    found = [_numbers(Path(root, "proc/meminfo")).get("MemAvailable:", 0) * 1024]
    group = Path(root, "sys/fs/cgroup", linux.cgroups().get("", "/").lstrip("/"))
    for folder in (group, *group.parents):
        with contextlib.suppress(OSError, ValueError):  # no such file, or no limit: "max"
            limit, used = (int((folder / name).read_text()) for name in ("memory.max", "memory.current"))
            kinds = _numbers(folder / "memory.stat")
            found.append(limit - used + kinds.get("inactive_file", 0) + kinds.get("active_file", 0))
    return min(found)


def _numbers(path: Path) -> dict[str, int]:
    with contextlib.suppress(OSError):
        return {line.split()[0]: int(line.split()[1]) for line in path.read_text().splitlines()}
    return {}


@contextlib.contextmanager
def _opened(path: str) -> Iterator[int]:
    file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        yield file
    finally:
        os.close(file)
