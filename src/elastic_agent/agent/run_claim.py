"""Claims a run for one endpoint, and on one machine for one command, among the agents that share a state directory.

A machine stores the history of a run by the run's name alone, so that a run whose store moves to another host (a
requeued job, say) resumes where it was. Two runs of one name at two endpoints would resume from each other's state.
So the agents of a run share a lock on a file that names their endpoint, for as long as they live; an agent with
another endpoint finds it locked and refuses to start. So does an agent of the same machine with another command: it
would wait as a spare node of a run that does something else.

A scheduler may start a job again while agents of its earlier life still run (on a node whose daemon hangs). The later
life asks them to stop, by a file beside the lock, and waits.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import fcntl
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec

from elastic_agent.files import is_at, write_atomically
from elastic_agent.linux import boot_id, pid_namespace
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Job
from elastic_agent.rendezvous.disk_thread import DiskThread
from elastic_agent.transport import TransportError, connect, is_local, is_loopback_name, resolve
from elastic_agent.values import Endpoint

CLAIM_FILE, STOP_FILE = "=endpoint.lock", "=stop.lock"
"""No node can have these names; swept with the locks of the run's nodes."""

PATIENCE_S, PAUSE_S = 10.0, 0.1
"""How long to wait for agents of another endpoint, which may just be ending (a requeued job)."""

LONG_PAUSE_S = 1.0
"""Between the attempts of a longer wait: each is some calls to a file server."""

DIAL_TIMEOUT_S = 2.0

ANSWER_S = 1.0
"""How long reading whether a later life of the job waits may take."""

UNKNOWN_JOB = Job()


class RunElsewhereError(Exception):
    """A run of this name is in progress at another endpoint; the message names it."""

    def __init__(self, found: ClaimedEndpoint | None, claimed: ClaimedEndpoint) -> None:
        """Name the other endpoint, if it could be read (``found``)."""
        super().__init__(found.shown if found is not None else "another endpoint")
        self.is_earlier_life = found is not None and claimed.job.is_later_life_of(found.job)
        """Whether its agents are of an earlier life of the same job."""


class OtherCommandError(Exception):
    """A run of this name is in progress on this machine with another command; the message is that command."""


@dataclass(frozen=True)
class ClaimedEndpoint:
    """An endpoint, and keys that identify it under any of its names and on any machine."""

    shown: str
    backend: str
    boot: str
    """Of the machine whose agent wrote this."""
    keys: list[str]
    dial: list[str | int]
    """Host and port that other machines can try; empty if there are none."""
    command: str = ""
    """What the agent that wrote this runs; empty: not known."""
    pid: int = 0
    processes: str = ""
    """That agent's process id, and the namespace in which it is valid."""
    job: Job = UNKNOWN_JOB
    """What that agent takes part for."""

    @classmethod
    def of(
        cls, endpoint: Endpoint | None, backend: str, command: str = "", job: Job = UNKNOWN_JOB
    ) -> ClaimedEndpoint:
        """Return the endpoint in these settings; None: a store of this agent's own."""
        boot = boot_id()
        # Names of files and arguments may be no text.
        writer = without_surrogates(command, "backslashreplace"), os.getpid(), pid_namespace(), job
        if endpoint is None or not endpoint.port:
            shown = f"a standalone endpoint on {os.uname().nodename}"
            return cls(shown, backend, boot, [f"{boot} {os.getpid()}"], [], *writer)
        keys = {key for member in endpoint.members for key in _keys(member, backend, boot)}
        local = all(is_loopback_name(member.host) for member in endpoint.members)
        dial: list[str | int] = [] if local or backend != "c10d" else [endpoint.host, endpoint.port]
        return cls(str(endpoint), backend, boot, sorted(keys), dial, *writer)

    def is_same(self, other: ClaimedEndpoint) -> bool:
        """Return whether both mean the same store."""
        return not {*self.keys}.isdisjoint(other.keys)

    def is_other_command(self, other: ClaimedEndpoint) -> bool:
        """Return whether the other one's agent runs on this machine, too, and runs something else.

        Arguments may differ between machines.
        """
        if (self.boot, self.processes) != (other.boot, other.processes) or "" in (
            self.command,
            other.command,
        ):
            return False
        return self.command != other.command and Path(f"/proc/{other.pid}").exists()

    def may_be_in_use(self) -> bool:
        """Return whether the agents that locked it may be alive: a file server keeps locks of the dead for a while."""
        if not self.dial or self.boot == boot_id():
            return True
        host, port = self.dial
        try:
            connect(str(host), int(port), DIAL_TIMEOUT_S).close()
        except TransportError:
            return False
        return True


def _keys(endpoint: Endpoint, backend: str, boot: str) -> set[str]:
    own = f"{backend} {boot}:{endpoint.port}"
    if is_loopback_name(endpoint.host):
        return {own}
    keys = {f"{backend} {endpoint.host}:{endpoint.port}"}
    with contextlib.suppress(TransportError):
        addresses = resolve(endpoint.host)
        apart = [address for _, address in addresses if not is_loopback_name(address)]
        keys |= {f"{backend} {address}:{endpoint.port}" for address in apart}
        keys |= {own} if is_local(addresses) else set()
    return keys


class RunClaim:
    """This agent's share in the lock; keep it as long as the agent takes part."""

    def __init__(self, handle: int, folder: Path, job: Job) -> None:
        """See :meth:`take`."""
        self.has_waited = False
        """Other agents were in the way, and have ended."""
        self._handle = handle
        self._folder = folder
        self._job = job
        self._disk = DiskThread("stop-request")

    @classmethod
    def take(cls, folder: Path, claimed: ClaimedEndpoint) -> RunClaim:
        """Take part in the run whose locks are in ``folder``, at this endpoint. Blocks.

        Raises:
            RunElsewhereError: live agents take part in a run of that name at another endpoint. If they are of an
                earlier life of the same job, they have been asked to stop.
            OtherCommandError: live agents of this machine do so at this endpoint with another command.
            OSError: the folder cannot be written.
        """
        path = folder / CLAIM_FILE
        while True:
            folder.mkdir(parents=True, exist_ok=True)
            try:
                handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
            except FileNotFoundError:
                continue  # the folder was swept in between
            found = _share(handle, claimed)
            at_endpoint = found is not None and claimed.is_same(found)
            is_ours = found is not None and at_endpoint and not claimed.is_other_command(found)
            if is_ours and is_at(handle, path):
                claim = cls(handle, folder, claimed.job)
                if not claim.is_to_stop():  # the request was for those that have ended
                    (folder / STOP_FILE).unlink(missing_ok=True)
                return claim
            is_left = found is not None and not at_endpoint and not found.may_be_in_use()
            if is_left and is_at(handle, path):  # else another agent has replaced it meanwhile
                path.unlink(missing_ok=True)
            os.close(handle)
            if is_left:
                continue
            if found is not None and at_endpoint:
                raise OtherCommandError(found.command)
            refusal = RunElsewhereError(found, claimed)
            if refusal.is_earlier_life:
                _request_stop(folder, claimed.job)
            raise refusal

    @classmethod
    async def await_turn(
        cls,
        folder: Path,
        claimed: Callable[[], ClaimedEndpoint],
        life_s: float,
        waits: Callable[[RunElsewhereError], None],
    ) -> RunClaim:
        """Take part as soon as agents in the way have ended, which may just be ending.

        Args:
            folder: as in :meth:`take`, which see for the errors, too.
            claimed: gives the endpoint; may block.
            life_s: how long an earlier life of the same job may take to end.
            waits: called once, if there is one.
        """
        began_s, asked, has_waited = time.monotonic(), False, False
        disk = DiskThread("claim")  # not asyncio.to_thread, whose thread would stay
        endpoint = await asyncio.wrap_future(disk.submit("endpoint", claimed))
        while True:
            try:
                claim = await asyncio.wrap_future(disk.submit("claim", lambda: cls.take(folder, endpoint)))
                claim.has_waited = has_waited
                return claim
            except (RunElsewhereError, OtherCommandError) as refusal:
                is_earlier_life = isinstance(refusal, RunElsewhereError) and refusal.is_earlier_life
                if isinstance(refusal, RunElsewhereError) and is_earlier_life and not asked:
                    asked = True
                    waits(refusal)
                patience_s = life_s if is_earlier_life else PATIENCE_S
                has_waited, waited_s = True, time.monotonic() - began_s
                if waited_s >= patience_s:
                    raise
            await asyncio.sleep(PAUSE_S if waited_s < PATIENCE_S else LONG_PAUSE_S)

    async def has_successor(self) -> bool:
        """Return whether a later life of this agent's job waits for its end; False if the disk does not answer."""
        try:
            return await self._disk.call_async("stop-request", self.is_to_stop, ANSWER_S)
        except OSError:
            return False

    def is_to_stop(self) -> bool:
        """Return the same; blocks, and raises OSError."""
        request = _stop_request(self._folder)
        return request is not None and request.is_later_life_of(self._job)

    def release(self) -> None:
        """Take part no more."""
        os.close(self._handle)


def _request_stop(folder: Path, job: Job) -> None:
    """Ask the agents of earlier lives of this job to stop, unless it or a later life has."""
    known = _stop_request(folder)
    if known is None or (known != job and not known.is_later_life_of(job)):
        write_atomically(folder / STOP_FILE, msgspec.json.encode(job))


def _stop_request(folder: Path) -> Job | None:
    """Return the life that asks earlier ones to stop."""
    try:
        return msgspec.json.decode((folder / STOP_FILE).read_bytes(), type=Job)
    except (FileNotFoundError, ValueError, RecursionError):
        return None


def _share(handle: int, claimed: ClaimedEndpoint) -> ClaimedEndpoint | None:
    """Share the lock, and read which endpoint the file names; None while another agent writes it.

    A file that no agent has locked is rewritten with this endpoint.
    """
    if _locked(handle, fcntl.LOCK_EX):
        content = msgspec.json.encode(claimed)
        os.ftruncate(handle, 0)
        os.pwrite(handle, content, 0)
    return _read(handle) if _locked(handle, fcntl.LOCK_SH) else None


def _locked(handle: int, how: int) -> bool:
    try:
        fcntl.flock(handle, how | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno in (errno.EWOULDBLOCK, errno.EACCES):
            return False
        raise
    return True


def _read(handle: int) -> ClaimedEndpoint | None:
    try:
        return msgspec.json.decode(os.pread(handle, 65536, 0), type=ClaimedEndpoint)
    except (ValueError, RecursionError):
        return None
