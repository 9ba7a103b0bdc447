"""The rendezvous in an etcd whose members are the agents' own; everything else is the etcd backend."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Sequence

from elastic_agent.protocol import Seat
from elastic_agent.rendezvous.backends import BackendOptions
from elastic_agent.rendezvous.backends.etcd.backend import EtcdBackend
from elastic_agent.rendezvous.run_history import new_run_id
from elastic_agent.transport import (
    JOBS,
    NodeRecords,
    Obstacle,
    RunKeys,
    TransportError,
    name_in,
    runs_with_nodes,
)
from elastic_agent.transport.etcd import EtcdTable
from elastic_agent.values import EtcdAccess

from .hosting import IF_LOST, Hosting

NEED_CHECK_S = 0.3
NEW_RUN_S = 3600
"""For how long it is known that a run is new; it has a plan long before."""


class MembersBackend(EtcdBackend):
    """One run in the etcd of these machines."""

    def __init__(self, options: BackendOptions) -> None:
        """Prepare; connects to nothing yet. Raises ValueError: this machine is to host a member, and has no etcd."""
        super().__init__(options, EtcdAccess())
        self._hosting = Hosting(options.endpoint, options.state_dir, self.secret, options.local_addr)
        self._members.preferred = self._hosting.own or 0  # so the loss of another machine costs no connection
        self._needed_by: list[str] | None = None
        """The runs that have nodes, as last read; None before that."""

    async def _table(self) -> EtcdTable:
        self._hosting.begin()
        client = await self._members.dial()
        return EtcdTable(client, self._members.root, on_close=lambda: self._members.suspect(client))

    async def _agree_on(self, fingerprint: str, known: str | None) -> str:
        proposal = known or new_run_id()
        with contextlib.closing(await self._table()) as table:
            if known is None:
                await table.put(RunKeys(proposal).new, b"1", NEW_RUN_S)
            stored = await table.swap(f"{JOBS}{fingerprint}", None, proposal.encode())
        return name_in(stored or b"") or proposal

    async def release(self) -> None:
        """Give the agreed name back; see :class:`RendezvousBackend`."""
        if self._fingerprint is not None:
            with contextlib.closing(await self._table()) as table:
                await table.swap(f"{JOBS}{self._fingerprint}", self.run_id.encode(), b"")

    async def connect(self) -> NodeRecords:
        """Return a connection to one member; hosts those of this machine from the first time on."""
        self._hosting.begin()
        return await super().connect()

    @property
    def processes(self) -> list[int]:
        """Those of the members of this machine."""
        return self._hosting.processes

    async def members(self) -> dict[str, str]:
        """Return how the members are, by host."""
        return await self._hosting.roles()

    def how_to_reach(self, obstacle: Obstacle, had_answered: bool, seats: Sequence[Seat]) -> str:
        """Return what brings a majority of the members back; see :class:`RendezvousBackend`."""
        ports = f"{self._endpoint.port} and {self._endpoint.port + 1}"
        start = "start the same command there"
        remedy = f"a majority of these machines must be up: {start}, and open ports {ports} between them"
        if not had_answered:
            return remedy  # while the members first start, no data can have been lost
        return f"{remedy}; {IF_LOST}"

    @property
    def busy_with(self) -> list[str]:
        """The runs that need the members of this machine, if it has any."""
        own = [self.run_id] if self.run_id else []
        needed_by = self._needed_by if self._needed_by is not None else own
        return super().busy_with or (needed_by if self._hosting.is_supervising else [])

    async def changed(self) -> None:
        """Wait until ``busy_with`` has changed; an etcd without a majority for a lease is of no use to any run."""
        before, clock = self.busy_with, asyncio.get_running_loop().time
        read_s = clock()
        while before and self.busy_with == before:
            await asyncio.sleep(NEED_CHECK_S)
            try:
                with contextlib.closing(await self._table()) as table:
                    self._needed_by, read_s = await runs_with_nodes(table), clock()
            except TransportError:
                if clock() - read_s > self._lease_ttl_s:
                    self._needed_by = []

    async def leave(self) -> None:
        """Resign, and end the members that this agent supervises."""
        await super().leave()
        await self._hosting.end()
