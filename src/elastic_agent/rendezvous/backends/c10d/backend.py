"""The c10d rendezvous backend: dialling, hosting, and the coordinator that runs in the hosting process.

The agent whose machine the endpoint names hosts the store, if it has dialled and nothing answers; this election
repeats on every dial, so another agent of the same machine takes over when the host's agent dies.
"""

from __future__ import annotations

import asyncio
import contextlib
import ipaddress
import socket
from collections.abc import Sequence

from elastic_agent.protocol import Plan, Seat
from elastic_agent.rendezvous.backends import BackendOptions, RendezvousBackend
from elastic_agent.rendezvous.run_history import new_run_id
from elastic_agent.transport import (
    NodeRecords,
    Obstacle,
    ReportRecords,
    UnreachableError,
    c10d,
    how_to_reach,
    is_local,
    is_loopback_name,
    own_network_problem,
    resolve,
    run_abandonable,
)
from elastic_agent.values import Endpoint

from .coordinator import CoordinatorThread, StoreCoordinator

DIAL_TIMEOUT_S = 5.0


class C10dBackend(RendezvousBackend):
    """A c10d store at the endpoint, hosted by one of the agents there."""

    def __init__(self, options: BackendOptions) -> None:
        """Prepare; connects to nothing yet.

        With port 0, the store is on any free port, and known to this agent alone: the secret has no effect.
        """
        self._alone = options.endpoint.port == 0
        """Any port will do: no other agent can know it, nor can a restart of this one."""
        super().__init__(options)
        self._store_secret = None if self._alone else self.secret
        """The secret that clients of the store need."""
        self._host: c10d.C10dHost | None = None
        self._hosting: asyncio.Task[None] | None = None
        """Finds out whether to host the store."""
        self._coordinator: StoreCoordinator | None = None
        self._coordination: CoordinatorThread | None = None
        self._plans: dict[str, Plan] = {}
        """The newest plan of each run of the store that this process hosts; written by the coordinator's thread."""
        self._store_addresses: list[tuple[int, str]] = []
        """Of the store's machine, as last dialled."""
        self._is_store_here = False
        """That machine is this one: its next host reads the same run history."""

    # -- which run ------------------------------------------------------------------------------

    async def agree(self, fingerprint: str) -> str:
        """Host the store first if need be; see :class:`RendezvousBackend`."""
        await self._host_if_needed()
        if not self._alone:
            return await super().agree(fingerprint)
        self.run_id, self._fingerprint = await self._agree_on(fingerprint, None), fingerprint
        return self.run_id

    async def _agree_on(self, fingerprint: str, known: str | None) -> str:
        proposal = known or new_run_id()
        return await c10d.agree_run_id(
            self._endpoint, fingerprint, proposal, DIAL_TIMEOUT_S, self._store_secret
        )

    async def release(self) -> None:
        """Remove the agreed name from the store; see :class:`RendezvousBackend`."""
        if self._fingerprint is not None:
            await c10d.release_run_id(
                self._endpoint, self._fingerprint, self.run_id, DIAL_TIMEOUT_S, self._store_secret
            )

    def run_ended(self) -> None:
        """Have the next start of the same job be a new run; see :class:`RendezvousBackend`.

        If another process of this machine hosts the store, its coordinator says so on disk when all nodes have
        acknowledged the outcome: until then, a host that is started again has to tell it to those that have not.
        """
        if self.is_host or not self._is_store_here:
            super().run_ended()
        self._forget_job()

    # -- dialling and hosting -------------------------------------------------------------------

    async def connect(self) -> NodeRecords:
        """Return a new connection to the run's store; hosts it first if nothing answers and the endpoint is local."""
        if self._endpoint.port != 0:
            try:
                return await self._dial(self.run_id)
            except UnreachableError:
                await self._host_if_needed()
                if self._host is None:
                    raise
        await self._host_if_needed()
        return await self._dial(self.run_id)

    async def _dial(self, run_id: str) -> NodeRecords:
        host = self._endpoint.host
        self._store_addresses, self._is_store_here = await run_abandonable(
            lambda: _addresses_of(host), c10d.LOOK_UP_S
        )
        return await c10d.dial(self._endpoint, run_id, DIAL_TIMEOUT_S, self._store_secret)

    async def connect_reports(self) -> ReportRecords:
        """Return a new connection to the store."""
        return await c10d.dial_reports(self._endpoint, self.run_id, DIAL_TIMEOUT_S, self._store_secret)

    def is_at_store(self, seat: Seat) -> bool:
        """Return whether its address is one of the endpoint's."""
        return seat.address in {address for _, address in self._store_addresses}

    def how_to_reach(self, obstacle: Obstacle, had_answered: bool, seats: Sequence[Seat]) -> str:
        """Return nothing where an agent of the machine of the store takes over; see :class:`RendezvousBackend`."""
        host, port = self._endpoint.host, self._endpoint.port
        if not had_answered:
            return how_to_reach(obstacle, host, port)
        if self._is_store_here or not how_to_reach(obstacle, host, port, had_answered=True):
            return ""
        problems = [own_network_problem(*address) for address in self._store_addresses]
        if all(problems):
            return next(iter(problems), "")
        node = next(filter(self.is_at_store, seats), None)
        if node is None:
            restart = "what hosted it (the same command, or elastic-agent serve)"
            remedy = how_to_reach(obstacle, host, port, restart, had_answered=True)
        else:
            remedy = (
                f"node {node.node_id} ({node.address}) hosts it; "
                f"{how_to_reach(obstacle, node.node_id, port, had_answered=True)}"
            )
        return f"{remedy}: the run continues when the store answers"

    async def _host_if_needed(self) -> None:
        """Host the store if nothing answers and the endpoint is local.

        In a task of its own: several parts of the agent may dial at the same time, and none that gives up is to
        leave a store behind that nothing coordinates.
        """
        if self._host is not None:
            return
        if self._hosting is None or self._hosting.done():
            self._hosting = asyncio.create_task(self._find_or_host(), name="hosting")
            # An error that nobody waits for any more is not logged: the next attempt meets it again.
            self._hosting.add_done_callback(lambda hosting: hosting.cancelled() or hosting.exception())
        await asyncio.shield(self._hosting)

    async def _find_or_host(self) -> None:
        self._host = await c10d.find_or_host(
            self._endpoint, DIAL_TIMEOUT_S, self._store_secret, self._serve, alone=self._alone
        )
        if self._host is not None:
            # With --standalone, port 0 was asked for.
            self._endpoint = Endpoint(self._endpoint.host, self._host.port)
            self._start_coordinator(self._host)

    def _start_coordinator(self, host: c10d.C10dHost) -> None:
        self._log.info(f"hosting the store at {self._endpoint}")
        if self.secret is None and not is_loopback_name(self._endpoint.host):
            self._log.info(
                f"every program that can connect to port {host.port} of this machine can join or end the run; to let "
                "in only agents with a secret, see --secret-file"
            )
        loop = asyncio.get_running_loop()

        def changed() -> None:
            with contextlib.suppress(RuntimeError):  # the loop is closed: the agent has ended
                loop.call_soon_threadsafe(self._poke)

        self._coordinator = StoreCoordinator(
            host.inbox,
            self.history_store,
            changed,
            on_plan=self._plans.__setitem__,
        )
        self._coordination = CoordinatorThread(self._coordinator)

    @property
    def is_host(self) -> bool:
        """True if this process hosts the store."""
        return self._host is not None

    # -- the end --------------------------------------------------------------------------------

    @property
    def busy_with(self) -> list[str]:
        """Runs that still need the store this process hosts."""
        coordinator = self._coordinator
        return coordinator.busy_with if coordinator is not None else []

    def depending(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that need the store here: those on other machines, as an agent on this one takes over."""
        nodes: list[str] = []
        for run_id in self.busy_with:
            plan = self._plans.get(run_id)
            if plan is None or plan.is_terminal or plan.world is None:
                continue
            seats = [seat for seat in plan.world.seats if run_id != self.run_id or seat.node_id != node_id]
            if not any(_is_here(seat.address) for seat in seats):
                nodes.extend(seat.node_id for seat in seats)
        return tuple(nodes)

    def _poke(self) -> None:
        if self._coordinator is not None and self._coordinator.failed:
            self._close_host()  # connected nodes would wait for ever: have all of them reconnect
        super()._poke()

    def close(self) -> None:
        """Stop hosting."""
        if self._hosting is not None:
            self._hosting.cancel()
        self._close_host()

    def _close_host(self) -> None:
        if self._coordination is not None:
            self._coordination.stop()
        if self._host is not None:
            self._host.close()
        self._host = self._coordinator = self._coordination = None
        self._plans.clear()


def _addresses_of(host: str) -> tuple[list[tuple[int, str]], bool]:
    """Return the addresses of a machine, and whether it is this one."""
    addresses = resolve(host)
    return addresses, is_local(addresses)


def _is_here(address: str) -> bool:
    """Return whether it is an address of this machine; a name is not looked up, which may take long."""
    try:
        version = ipaddress.ip_address(address.partition("%")[0]).version
    except ValueError:
        return address == "localhost"
    return is_local([(socket.AF_INET6 if version == 6 else socket.AF_INET, address)])
