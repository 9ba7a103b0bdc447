"""Which node this agent is, and whether its predecessor's workers are gone.

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
import json
import os
import re
import select
import socket
import threading
import time
from dataclasses import dataclass, field
from pathlib import Path

from elastic_agent.files import all_but_newest, is_at, locked, modified_s
from elastic_agent.linux import boot_id, boottime_s, pid_namespace, start_ticks

MAX_AGENTS_PER_MACHINE = 256

KEPT_RUNS = 200
"""The node-id locks of this many runs are kept, the newest, and those of all that are in progress."""

LOCK_ATTEMPTS = 100
"""An agent that sweeps may remove the file that is to be locked, but hardly so often."""

Process = tuple[int, int]
"""A process beyond doubt: pid and start time in clock ticks since boot."""


class IdentityError(Exception):
    """The wanted node id cannot be taken; one line for the user."""


def host_name() -> str:
    """Return this machine's short name, in the characters that ids may have."""
    short = socket.gethostname().split(".")[0]
    return re.sub(r"[^A-Za-z0-9._:@+-]", "-", short)[:96] or "node"


@dataclass
class NodeIdLock:
    """A held node id. Keep the object alive as long as the agent lives."""

    node_id: str
    explicit: bool
    predecessor: str | None
    """The previous incarnation under this id whose workers are proven gone, if there was one."""
    _handle: int
    _path: Path
    beside: str = ""
    """The node id of another agent of this machine in the same run, with its process; empty: there is none."""
    _lock: threading.Lock = field(default_factory=threading.Lock)
    """Keeps a late record from being written to a descriptor that was closed and given to another file."""
    _released: bool = False

    @property
    def warning(self) -> str:
        """What to know about the other agent, in words; empty: there is none."""
        return self.beside and (
            f"another agent on this machine takes part in this run as node {self.beside}; this one is node "
            f"{self.node_id}. If it was started twice by mistake, Ctrl-C ends this one; if the other one is left from "
            "an earlier start, stop that process"
        )

    def record(self, incarnation: str, processes: list[Process]) -> None:
        """Record the holder of the lock, and the processes that a successor has to look for. Raises OSError.

        May be called in a thread, as the disk may hang; after the release it does nothing.
        """
        holder = {
            "incarnation": incarnation,
            "boot": boot_id(),
            "namespace": pid_namespace(),
            "agent": os.getpid(),
            "processes": processes,
        }
        with self._lock:
            if self._released:
                return
            handle = os.dup(self._handle)
        try:
            os.pwrite(handle, json.dumps(holder).encode().ljust(4096), 0)
        except OSError as error:
            error.filename = str(self._path)
            raise
        finally:
            os.close(handle)

    def release(self) -> None:
        """Give the id back, unless that was done before."""
        with self._lock:
            if not self._released:
                self._released = True
                os.close(self._handle)


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
    if wanted is not None:
        handle = _lock(folder / f"{wanted}.lock")
        if handle is None:
            raise IdentityError(
                f"node id {wanted} is in use by another agent on this machine{_holder(folder, wanted)}; "
                "wait until it has exited, choose another --node-id, or omit it to get a free one"
            )
        return NodeIdLock(wanted, True, _proven_gone(handle, wait_s), handle, folder / f"{wanted}.lock")
    base, held = host_name(), ""
    for number in range(1, MAX_AGENTS_PER_MACHINE + 1):
        node_id = base if number == 1 else f"{base}-{number}"
        if node_id in skip:
            continue
        handle = _lock(folder / f"{node_id}.lock")
        if handle is not None:
            return NodeIdLock(
                node_id, False, _proven_gone(handle, wait_s), handle, folder / f"{node_id}.lock", held
            )
        held = held or f"{node_id}{_holder(folder, node_id)}"
    raise IdentityError(f"all {MAX_AGENTS_PER_MACHINE} node ids of this machine are in use in {folder}")


def _holder(folder: Path, node_id: str) -> str:
    """Return which process holds a lock, and since when; empty if none is recorded in this pid namespace."""
    try:
        body = json.loads((folder / f"{node_id}.lock").read_bytes())
        agent, namespace = body["agent"], body["namespace"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return ""
    if not isinstance(agent, int) or namespace != pid_namespace():
        return ""
    ticks = start_ticks(agent)
    if ticks is None:
        return f" (process {agent})"
    started_s = time.time() - boottime_s() + ticks / os.sysconf("SC_CLK_TCK")
    return f" (process {agent}, started {time.strftime('%b %d, %H:%M:%S', time.localtime(started_s))})"


def _lock(path: Path) -> int | None:
    for _ in range(LOCK_ATTEMPTS):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        except FileNotFoundError:
            continue  # the folder was swept in between
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if is_at(handle, path):
                return handle
        except OSError as error:
            os.close(handle)
            if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
                return None
            raise
        os.close(handle)  # it was removed in between: no other agent would find this lock
    raise FileNotFoundError(errno.ENOENT, "the file is removed again as soon as it is created", str(path))


def prune_node_ids(nodes: Path, keep: int = KEPT_RUNS, at_most: int = 100) -> None:
    """Remove the node-id locks of runs that no agent of this machine takes part in, but for the newest runs.

    What is lost with a lock is its last holder, whose lease ran out long ago. Several agents may do this at once;
    nothing is raised.

    Args:
        nodes: where the runs' folders are.
        keep: how many runs stay in any case.
        at_most: how many folders to remove in one call, so that it does not take long.
    """
    folders: list[Path] = []
    with contextlib.suppress(OSError):
        folders = list(nodes.iterdir())
    for _, folder in all_but_newest(folders, keep, _last_used_s)[-at_most:]:
        with contextlib.suppress(OSError):
            for path in folder.glob("*.lock"):
                with locked(path) as handle:
                    if is_at(handle, path):  # else it is a new one, and not locked by us
                        path.unlink()
            folder.rmdir()  # fails if a lock is held, or something else is in it


def _last_used_s(folder: Path) -> float:
    return max(map(modified_s, folder.glob("*.lock")), default=modified_s(folder))


def _proven_gone(handle: int, wait_s: float) -> str | None:
    """Return the last holder's incarnation, if none of the processes that it recorded is alive.

    Only processes of this boot, in this pid namespace, can be looked for. Another boot id proves nothing: it may be
    that of another machine, and neither the name nor the machine id of a container identifies its machine.
    """
    try:
        body = json.loads(os.pread(handle, 4096, 0) or b"{}")
        incarnation, boot, namespace = (str(body[key]) for key in ("incarnation", "boot", "namespace"))
        processes = [(int(pid), int(ticks)) for pid, ticks in body["processes"]]
    except (ValueError, KeyError, TypeError, OverflowError, RecursionError):
        return None
    if not (boot and namespace) or (boot, namespace) != (boot_id(), pid_namespace()):
        return None
    return incarnation if all(_await_end(process, wait_s) for process in processes) else None


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
