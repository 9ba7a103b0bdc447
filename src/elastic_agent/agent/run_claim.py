"""Claims a run for one endpoint, and on one machine for one command, among the agents that share a state directory.

A machine stores the history of a run by the run's name alone, so that a run whose store moves to another host (a
requeued job, say) resumes where it was. Two runs of one name at two endpoints would resume from each other's state.
So the agents of a run share a lock on a file that names their endpoint, for as long as they live; an agent with
another endpoint finds it locked and refuses to start. So does an agent of the same machine with another command: it
would wait as a spare node of a run that does something else.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
from pathlib import Path

import msgspec

from elastic_agent.files import is_at
from elastic_agent.linux import boot_id, pid_namespace
from elastic_agent.printable import without_surrogates
from elastic_agent.protocol import Job
from elastic_agent.transport import TransportError, is_local, is_loopback_name, resolve
from elastic_agent.values import Endpoint

from .identity import LOCK_ATTEMPTS, is_lockable, open_lock, removed_again

CLAIM_FILE = "=endpoint.lock"
"""No node can have this name; swept with the locks of the run's nodes."""

UNKNOWN_JOB = Job()


class OtherRunError(Exception):
    """Live agents take part in a run of this name at another endpoint, which the message names."""

    is_earlier_life = False
    """They are of an earlier life of the same scheduler's job."""


class OtherCommandError(OtherRunError):
    """They are of this machine and run another command; the message is that command."""


class Claim(msgspec.Struct, frozen=True):
    """An endpoint, keys that identify it under any of its names and on any machine, and the agent that wrote this."""

    endpoint: str
    keys: list[str]
    boot: str
    """Of the machine of this agent."""
    pid: int
    processes: str
    """The namespace in which its process id is valid."""
    command: str = ""
    """The command of its workers; empty: not known."""
    job: Job = UNKNOWN_JOB
    """The job for which it takes part."""

    @classmethod
    def of(cls, endpoint: Endpoint | None, backend: str, command: str = "", job: Job = UNKNOWN_JOB) -> Claim:
        """Return the endpoint in these settings; None: a store of this agent's own. Looks up names."""
        boot = boot_id()
        # Names of files and arguments may be no text.
        writer = boot, os.getpid(), pid_namespace(), without_surrogates(command, "backslashreplace"), job
        if endpoint is None or not endpoint.port:
            return cls(f"a standalone endpoint on {os.uname().nodename}", [f"{boot} {os.getpid()}"], *writer)
        keys = {key for member in endpoint.members for key in _keys(member, backend, boot)}
        return cls(str(endpoint), sorted(keys), *writer)

    def take(self, folder: Path) -> int:
        """Take part in the run whose locks are in ``folder``, at this endpoint.

        Returns:
            The descriptor that holds the lock, to be closed when the agent takes part no more.

        Raises:
            OtherRunError: live agents take part in a run of that name at another endpoint, or with another command.
            OSError: the folder cannot be written.
        """
        path = folder / CLAIM_FILE
        for _ in range(LOCK_ATTEMPTS):
            handle = open_lock(path)
            try:
                found = self._share(handle)
                if found is None or {*self.keys}.isdisjoint(found.keys):
                    refusal = OtherRunError(found.endpoint if found is not None else "another endpoint")
                    refusal.is_earlier_life = found is not None and self.job.is_later_life_of(found.job)
                    raise refusal
                if found.runs_here_and_differs_from(self):
                    raise OtherCommandError(found.command)
                if is_at(handle, path):  # else it was swept meanwhile
                    return os.dup(handle)
            finally:
                os.close(handle)
        raise removed_again(path)

    def _share(self, handle: int) -> Claim | None:
        """Share the lock and return what the file says; None while another agent writes it.

        A file that no agent has locked is rewritten with this claim.
        """
        if is_lockable(handle, fcntl.LOCK_EX):
            os.ftruncate(handle, 0)
            os.pwrite(handle, msgspec.json.encode(self), 0)
        if not is_lockable(handle, fcntl.LOCK_SH):
            return None
        with contextlib.suppress(ValueError, RecursionError):
            return msgspec.json.decode(os.pread(handle, 65536, 0), type=Claim)
        return None

    def runs_here_and_differs_from(self, own: Claim) -> bool:
        """Return whether the agent that wrote this runs on the same machine, and something else.

        Arguments may differ between machines.
        """
        is_here = (self.boot, self.processes) == (own.boot, own.processes) and bool(
            self.command and own.command
        )
        return is_here and self.command != own.command and Path(f"/proc/{self.pid}").exists()


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
