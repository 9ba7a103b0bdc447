"""Where the agents of a run meet in etcd: dialling its members, and one agent that coordinates at a time."""

from __future__ import annotations

import threading
from pathlib import Path

from elastic_agent.transport.base import NodeLink, NotAStoreError, TransportError, UnreachableError
from elastic_agent.transport.etcd import EtcdLink, KeptLeases, RunKeys, store_id
from elastic_agent.transport.etcd_client import EtcdClient
from elastic_agent.values import Endpoint, EtcdAccess, PortRange

from .candidate import Candidate
from .place import MeetingPlace


class Members:
    """The members of an etcd cluster, of which one that answers is used. Safe for threads."""

    def __init__(self, endpoint: Endpoint, access: EtcdAccess) -> None:
        self._members = endpoint.members
        self._access = access
        self._preferred = 0
        """The one that answered last; everything of this process goes there, so that one failure shows for all."""

    def dial(self) -> tuple[EtcdClient, str]:
        """A connection to a member that answers, and this etcd's name.

        Raises:
            UnreachableError: none answers; the message says of each why.
            NotAStoreError: none will, however often it is asked.
        """
        problems: list[TransportError] = []
        first = self._preferred
        for offset in range(len(self._members)):
            number = (first + offset) % len(self._members)
            try:
                found = self._dial_one(self._members[number])
            except TransportError as error:
                problems.append(error)
            else:
                self._preferred = number
                return found
        reasons = "; ".join(dict.fromkeys(str(problem) for problem in problems))
        if all(isinstance(problem, NotAStoreError) for problem in problems):
            raise NotAStoreError(reasons)
        raise UnreachableError(reasons)

    def _dial_one(self, member: Endpoint) -> tuple[EtcdClient, str]:
        client = EtcdClient(member, self._access)
        try:
            return client, store_id(client, self._access.prefix)
        except BaseException:
            client.close()
            raise


class EtcdMeeting(MeetingPlace):
    """One run in an etcd that others may use as well."""

    def __init__(
        self,
        endpoint: Endpoint,
        access: EtcdAccess,
        state_dir: Path,
        *,
        lease_ttl_s: float,
        port_range: PortRange | None,
        port_rest_s: float,
    ) -> None:
        """``lease_ttl_s``: of the run's nodes, seconds; ``port_rest_s`` as for every meeting place."""
        super().__init__(endpoint, state_dir, port_range=port_range, port_rest_s=port_rest_s)
        self._access = access
        self._members = Members(endpoint, access)
        self._lease_ttl_s = lease_ttl_s
        self._kept = KeptLeases(lease_ttl_s)
        self._lock = threading.Lock()
        self._candidate: Candidate | None = None

    def agree(self, fingerprint: str) -> str:
        """An etcd is shared by many: here every run has a name (the settings see to that)."""
        raise NotAStoreError("a run in etcd needs a name; give --rdzv-id, the same on every node")

    def release(self) -> None:
        """No name was agreed."""

    def connect(self) -> NodeLink:
        """A connection to one member; this agent stands for coordinator from the first one on."""
        assert self.run_id is not None  # set before
        client, store = self._members.dial()
        keys = RunKeys(self._access.prefix, self.run_id)
        with self._lock:
            if self._candidate is None:
                self._candidate = Candidate(
                    self.run_id,
                    keys,
                    lambda: self._members.dial()[0],
                    self.memory,
                    self._lease_ttl_s,
                    self._poke,
                )
                self._candidate.start()
        return EtcdLink(client, keys, store, self._kept)

    @property
    def busy_with(self) -> list[str]:
        """The run, while this agent coordinates it and its verdict is not known to everybody."""
        candidate = self._candidate
        return [self.run_id] if self.run_id and candidate is not None and candidate.winding_up else []

    def close(self) -> None:
        """Stand for coordinator no more; another agent takes over at once."""
        with self._lock:
            if self._candidate is not None:
                self._candidate.stop()
                self._candidate = None
