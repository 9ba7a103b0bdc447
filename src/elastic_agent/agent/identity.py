"""Determines the id of this agent's node, and whether the workers of its predecessor are gone.

A node id must be the same after the agent or the machine restarts. So each id of a machine's agents has a lock file
on its disk, one per run and id, held with ``flock`` for the agent's life (the kernel releases it however the agent
dies). The first agent of a machine takes ``<host>``, the second ``<host>-2``, and after both restart the same two
are taken again. The file also lists the processes that the holder started, by pid and start time, so that a
successor can prove them gone.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import select
import socket
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from elastic_agent.config.errors import UsageError
from elastic_agent.files import all_but_newest, is_at, locked, modified_s
from elastic_agent.linux import boot_id, boottime_s, pid_namespace, start_ticks
from elastic_agent.workers.output.folders import KEPT_RUNS

MAX_AGENTS_PER_MACHINE = 256

LOCK_ATTEMPTS = 100
"""An agent that sweeps may remove the file that is to be locked, but hardly so often."""

_RECORD_BYTES = 4096

_BESIDE = (
    "another agent on this machine takes part in this run as node {beside}; this one is node {node_id}. If it was "
    "started twice by mistake, Ctrl-C ends this one; if the other one is left from an earlier start, stop that process"
)

Process = tuple[int, int]
"""A process beyond doubt: pid and start time in clock ticks since boot."""


class IdentityError(Exception):
    """The wanted node id cannot be taken; one line for the user."""


def host_name() -> str:
    """Return this machine's short name, in the characters that ids may have."""
    short = socket.gethostname().split(".")[0]
    return re.sub(r"[^A-Za-z0-9._:@+-]", "-", short)[:96] or "node"


class Holder(msgspec.Struct):
    """The record that the holder of a node id writes into its lock file."""

    incarnation: str
    boot: str
    namespace: str
    agent: int
    processes: list[Process]
    """A successor has to look for these, by pid and start time in clock ticks since boot."""


@dataclass
class NodeIdLock:
    """A held node id. Keep the object alive as long as the agent lives."""

    node_id: str
    explicit: bool
    path: Path
    handle: int
    predecessor: str | None
    """The previous incarnation under this id whose workers are proven gone, if there was one."""
    warning: str = ""
    """A line about another agent of this machine in the same run; empty: there is none."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Keeps a late record from being written to a descriptor that was closed and given to another file."""

    def record(self, incarnation: str, processes: list[Process]) -> None:
        """Record the holder of the lock, and the processes that a successor has to look for. Raises OSError.

        May be called in a thread, as the disk may hang; after the release it does nothing.
        """
        holder = Holder(incarnation, boot_id(), pid_namespace(), os.getpid(), processes)
        with self._lock:
            handle = os.dup(self.handle) if self.handle >= 0 else -1
        if handle < 0:
            return
        try:
            os.pwrite(handle, msgspec.json.encode(holder).ljust(_RECORD_BYTES), 0)
        except OSError as error:
            error.filename = str(self.path)
            raise
        finally:
            os.close(handle)

    def release(self) -> None:
        """Give the id back, unless that was done before."""
        with self._lock:
            if self.handle >= 0:
                os.close(self.handle)
            self.handle = -1


def acquire_node_id(
    folder: Path, wanted: str | None, skip: frozenset[str] = frozenset(), wait_s: float = 2.0
) -> NodeIdLock:
    """Take a node id on this machine.

    Args:
        folder: where this run's lock files lie on this machine.
        wanted: an explicit node id, or None to take the first free one derived from the host's name.
        skip: derived ids that the run has refused.
        wait_s: how long to wait for a dead predecessor's processes to be gone.

    Raises:
        IdentityError: the explicit id is held by a live agent of this machine, or no id is free.
        OSError: the folder cannot be written.
    """
    base, beside = host_name(), ""
    derived = (f"{base}-{number}" if number > 1 else base for number in range(1, MAX_AGENTS_PER_MACHINE + 1))
    for node_id in [wanted] if wanted is not None else derived:
        path = folder / f"{node_id}.lock"
        if node_id in skip:
            continue
        handle = _lock(path)
        if handle is not None:
            holder = _holder(handle)
            is_gone = holder is not None and all(_await_end(process, wait_s) for process in holder.processes)
            predecessor = holder.incarnation if holder is not None and is_gone else None
            warning = beside and _BESIDE.format(beside=beside, node_id=node_id)
            return NodeIdLock(node_id, wanted is not None, path, handle, predecessor, warning)
        beside = beside or f"{node_id}{_since(path)}"
    if wanted is None:
        raise IdentityError(f"all {MAX_AGENTS_PER_MACHINE} node ids of this machine are in use in {folder}")
    raise IdentityError(
        f"node id {wanted} is in use by another agent on this machine{beside.removeprefix(wanted)}; "
        "wait until it has exited, choose another --node-id, or omit it to get a free one"
    )


def open_lock(path: Path) -> int:
    """Open a lock file, and make it and its folder if need be; they may be swept at any time. Raises OSError."""
    for _ in range(LOCK_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        with contextlib.suppress(FileNotFoundError):  # the folder was swept in between
            return os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    raise removed_again(path)


def removed_again(path: Path) -> FileNotFoundError:
    """Return the error of a file that cannot be locked; on some file systems a file's inode number changes."""
    return FileNotFoundError(errno.ENOENT, "the file is removed again as soon as it is created", str(path))


def is_lockable(handle: int, how: int) -> bool:
    """Lock an open file, and return whether that was possible: no other agent keeps it locked. Raises OSError."""
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _lock(path: Path) -> int | None:
    for _ in range(LOCK_ATTEMPTS):
        handle = open_lock(path)
        is_locked = False
        try:
            if not is_lockable(handle, fcntl.LOCK_EX):
                return None
            # Else it was removed in between: no other agent would find this lock.
            is_locked = is_at(handle, path)
            if is_locked:
                return handle
        finally:
            if not is_locked:
                os.close(handle)
    raise removed_again(path)


def _holder(handle: int) -> Holder | None:
    """Return what the last holder of a lock has recorded, if it was one of this boot and pid namespace.

    Only its processes can be looked for. Another boot id proves nothing: it may be that of another machine, and neither
    the name nor the machine id of a container identifies its machine.
    """
    try:
        holder = msgspec.json.decode(os.pread(handle, _RECORD_BYTES, 0), type=Holder)
    except (OSError, ValueError, RecursionError):
        return None
    here = boot_id(), pid_namespace()
    return holder if all(here) and (holder.boot, holder.namespace) == here else None


def _since(path: Path) -> str:
    """Return which process holds a lock, and since when; empty if that is not known."""
    with contextlib.suppress(OSError), path.open("rb") as file:
        holder = _holder(file.fileno())
        ticks = start_ticks(holder.agent) if holder is not None else None
        if holder is not None and ticks is not None:
            started_s = time.time() - boottime_s() + ticks / os.sysconf("SC_CLK_TCK")
            began = time.strftime("%b %d, %H:%M:%S", time.localtime(started_s))
            return f" (process {holder.agent}, started {began})"
    return ""


def prune_node_ids(nodes: Path, keep: int = KEPT_RUNS, at_most: int = 100) -> None:
    """Remove the node-id locks of runs that no agent of this machine takes part in, but for the newest runs.

    What is lost with a lock is its last holder, whose lease ran out long ago. Several agents may do this at once;
    nothing is raised.

    Args:
        nodes: where the runs' folders are.
        keep: how many runs stay in any case.
        at_most: how many folders to remove in one call, so that it does not take long.
    """

    def last_used_s(folder: Path) -> float:
        return max(map(modified_s, folder.glob("*.lock")), default=modified_s(folder))

    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders = list(nodes.iterdir())
    for _, folder in all_but_newest(folders, keep, last_used_s)[-at_most:]:
        with contextlib.suppress(OSError):
            for path in folder.glob("*.lock"):
                with locked(path) as handle:
                    if is_at(handle, path):  # else it is a new one, and not locked by us
                        path.unlink()
            folder.rmdir()  # fails if a lock is held, or something else is in it


def _await_end(process: Process, wait_s: float) -> bool:
    pid, ticks = process
    try:
        handle = os.pidfd_open(pid)
    except (OSError, OverflowError):  # there is no such process, and for a huge number there never was
        return True
    try:
        if start_ticks(pid) != ticks:
            return True  # the pid belongs to another process now
        readable, _, _ = select.select([handle], [], [], wait_s)
        return bool(readable)
    finally:
        os.close(handle)


@contextlib.contextmanager
def using_state_dir(state_dir: Path) -> Iterator[None]:
    """Report errors of what uses the state directory, and no other, as a wrong ``--state-dir``."""
    try:
        yield
    except OSError as error:
        where = f" {error.filename}:" if error.filename is not None else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        wanted = "free space there, or pass another one" if is_full else "expected a writable directory"
        raise UsageError(f"--state-dir {state_dir} is not usable:{where} {error.strerror}", wanted) from None


def try_state_dir(state_dir: Path) -> None:
    """Take a node id of no run there, and remove what that made; raises ``UsageError``."""
    folder = state_dir / "nodes" / f"=try-{os.getpid()}"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with using_state_dir(state_dir):
            lock = acquire_node_id(folder, "n")
            try:
                lock.record("", [])
            finally:
                lock.release()
    finally:
        with contextlib.suppress(OSError):
            (folder / "n.lock").unlink(missing_ok=True)
            for path in made:
                path.rmdir()
