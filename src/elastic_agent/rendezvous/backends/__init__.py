"""The rendezvous backends: what all have in common, and a folder for each store."""

from __future__ import annotations

import abc
import asyncio
from collections.abc import Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.files import with_remedy
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Address, Plan, Seat
from elastic_agent.rendezvous.run_history import JobFiles, RunHistoryStore
from elastic_agent.rendezvous.waits import in_time
from elastic_agent.transport import NodeRecords, Obstacle, ReportRecords, Secret, run_abandonable
from elastic_agent.transport.c10d import BootstrapStore, PortPicker, ServeStore, check_store, serve_here
from elastic_agent.values import Endpoint, EtcdAccess, PortRange

BOOTSTRAP_TIMEOUT_S = 5.0

DISK_S = 5.0
"""The time for reading, or writing, which run a job is."""


@dataclass(frozen=True)
class BackendOptions:
    """The facts and options that all backends have."""

    endpoint: Endpoint
    """Of the store."""
    state_dir: Path
    """This agent's."""
    lease_ttl_s: float = 0.0
    """Of the run's nodes, seconds."""
    fence_margin_s: float = 0.0
    local_addr: str | None = None
    """This machine's address, if given."""
    port_range: PortRange | None = None
    """The ports for bootstrap stores; None: any."""
    secret: Secret | None = None
    """The secret that all agents of the run share; None: they share none."""
    serve: ServeStore = serve_here
    """Serves stores."""


class RendezvousBackend(abc.ABC):
    """One endpoint, one run; a ``StoreDialer``. Used in one event loop; only what blocks is called in threads."""

    def __init__(self, options: BackendOptions) -> None:
        """Prepare; connects to nothing."""
        self.run_id = ""
        """The run's name: set by the owner, or agreed at the endpoint; empty before that."""
        self.history_store = RunHistoryStore(options.state_dir)
        self._jobs = JobFiles(options.state_dir)
        self._fingerprint: str | None = None
        """Of the job whose run was agreed; None: the run has been given a name."""
        self._endpoint = options.endpoint
        self.secret = options.secret
        """The secret that all agents of the run share; None: they share none."""
        self._serve = options.serve
        # For so long a paused worker of an old world may still dial the port that it knows.
        self._ports = PortPicker(options.port_range, 2 * (options.lease_ttl_s + options.fence_margin_s))
        self._changed = asyncio.Event()
        self._log = get_logger()

    @property
    def shown(self) -> str:
        """The endpoint as users write it."""
        return str(self._endpoint)

    # -- which run ------------------------------------------------------------------------------

    async def agree(self, fingerprint: str) -> str:
        """Find the run of this job at the endpoint, or create it. Takes one dial at most.

        Raises:
            UnreachableError: nothing answers (yet).
            NotAStoreError: another program answers.
            StoreLostError: the store went away meanwhile, or the disk hangs.
        """
        known = await run_abandonable(lambda: self._jobs.run_of(self._job(fingerprint)), DISK_S)
        run_id = await self._agree_on(fingerprint, known)
        self.run_id, self._fingerprint = run_id, fingerprint
        await run_abandonable(lambda: self._jobs.write(self._job(fingerprint), run_id), DISK_S)
        return run_id

    @abc.abstractmethod
    async def _agree_on(self, fingerprint: str, known: str | None) -> str:
        """Do that in the store; ``known``: the run of this machine that did not end in order."""

    def _job(self, fingerprint: str) -> str:
        return f"{self._endpoint} {fingerprint}"

    @abc.abstractmethod
    async def release(self) -> None:
        """Take in that the run has its outcome: the next job with this fingerprint at the endpoint is another run.

        Raises:
            TransportError: the store does not answer.
        """

    def run_ended(self) -> None:
        """Have the next start of the same job be a new run, under the same name too: this one ended in order.

        Only the coordinator knows whether all nodes acknowledged the outcome; but any machine may coordinate next
        time.
        """
        if self.run_id:
            self.history_store.settle(self.run_id)
        self._forget_job()

    def _forget_job(self) -> None:
        if self._fingerprint is not None:
            self._jobs.remove(self._job(self._fingerprint))

    @property
    def is_host(self) -> bool:
        """True if this process hosts the store."""
        return False

    # -- dialling -------------------------------------------------------------------------------

    @abc.abstractmethod
    async def connect(self) -> NodeRecords:
        """Return a new connection to the run's store; see ``StoreDialer``."""

    @abc.abstractmethod
    async def connect_reports(self) -> ReportRecords:
        """Return a new connection to the run's store for reports; hosts nothing.

        Raises:
            TransportError: the store does not answer.
        """

    async def offer_bootstrap(self, local_address: str) -> BootstrapStore:
        """Serve a fresh store for the workers of the next generation; see ``StoreDialer``."""
        return await run_abandonable(
            lambda: BootstrapStore.open(local_address, self._ports, self._serve),
            2 * BOOTSTRAP_TIMEOUT_S,
            too_late=lambda late: late.close(),
        )

    async def dial_bootstrap(self, address: Address) -> None:
        """Check that a generation's bootstrap store answers; see ``StoreDialer``."""
        checking = check_store(Endpoint(address.host, address.port), BOOTSTRAP_TIMEOUT_S)
        await in_time(checking, 2 * BOOTSTRAP_TIMEOUT_S)  # looking up a name may take much longer

    def is_at_store(self, seat: Seat) -> bool:
        """Return whether this node is on the machine of the store."""
        return False

    @abc.abstractmethod
    def how_to_reach(self, obstacle: Obstacle, had_answered: bool, seats: Sequence[Seat]) -> str:
        """Return what to do about a store that does not answer, in words; empty: the error says it.

        Args:
            obstacle: what the last attempt to reach it ended with.
            had_answered: it did before.
            seats: of the nodes of the last world.
        """

    @property
    def processes(self) -> list[int]:
        """The processes that serve the store beside this one, which no death of workers or their guard may end."""
        return []

    async def members(self) -> dict[str, str]:
        """Return how the machines are that host the store together, by host; none: no such do."""
        return {}

    # -- the end --------------------------------------------------------------------------------

    @property
    @abc.abstractmethod
    def busy_with(self) -> list[str]:
        """Runs that still depend on this process, besides its own part."""

    def depending(self, node_id: str) -> tuple[str, ...]:
        """Return the nodes that cannot go on without the store of this process, in which ``node_id`` is the node."""
        return ()

    async def changed(self) -> None:
        """Wait until ``busy_with`` may have changed."""
        self._changed.clear()
        if self.busy_with:
            await self._changed.wait()

    def _poke(self) -> None:
        """Wake the waiting task: ``busy_with`` may have changed."""
        self._changed.set()

    def remember(self, plan: Plan) -> None:
        """Write the run history to disk, for a new store; returns at once.

        Nothing waits for it: what has to be on disk before a node may act on a plan is the coordinator's to write.
        """
        if self.run_id:
            self.history_store.save_soon(self.run_id, plan).add_done_callback(self._log_if_not_saved)

    def _log_if_not_saved(self, outcome: Future[None]) -> None:
        error = outcome.exception()
        if isinstance(error, Exception):
            self._log.warning("cannot write the state directory", error=with_remedy(error))

    async def leave(self) -> None:
        """Close, once another process can take over what this one does for others; within a second."""
        self.close()

    @abc.abstractmethod
    def close(self) -> None:
        """Stop whatever is done for others, in the event loop or after it."""


def open_backend(options: BackendOptions, access: EtcdAccess | None) -> RendezvousBackend:
    """Return the rendezvous backend for the endpoint, which does not connect yet.

    It is etcd if ``access`` is given, an etcd of the agents' own if the endpoint lists several machines, else c10d.
    """
    if access is None and not options.endpoint.others:
        from .c10d.backend import C10dBackend

        return C10dBackend(options)
    if access is None:
        from .members.backend import MembersBackend

        return MembersBackend(options)
    from .etcd.backend import EtcdBackend  # gRPC takes a quarter of a second

    return EtcdBackend(options, access)
