"""The c10d store as transport: the server in one agent's process, and everybody's links to it.

Keys, all under ``elastic-agent/1/``:

    id                       random name of this store's life
    runs                     every run id that ever registered, one a line (append)
    inbox                    queue of "<run id> <incarnation>": hints for the coordinator
    default/<fingerprint>    the run id agreed for a job that gave none
    r/<run>/life             random name of this life of the run's records, which ends when they are removed
    r/<run>/jobs             fingerprints of the jobs for which this run was agreed, one a line (append)
    r/<run>/roster           every incarnation that ever registered, one a line (append)
    r/<run>/m/<incarnation>  member record        r/<run>/l/<incarnation>  lease
    r/<run>/plan/<version>   a plan; the first writer of a version wins (see :mod:`.plans`)
    r/<run>/latest           newest plan version  r/<run>/part/<digest>    part of a plan, by content
    r/<run>/status           what the coordinator waits for, in words

Whatever else is found under these keys was not written by us: it is reported once and passed over.
"""

from __future__ import annotations

import re
import resource
import secrets
import socket
import time
from collections.abc import Callable, Collection, Mapping

import msgspec
from torch._C._distributed_c10d import TCPStore

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Lease, Member, Plan, encode
from elastic_agent.transport.addresses import connect, is_local, listen, local_address_towards, resolve
from elastic_agent.transport.base import (
    NotAStoreError,
    Snapshot,
    StoreLostError,
    TransportError,
    UnreachableError,
)
from elastic_agent.transport.record_reader import GONE, RecordReader, lease_in
from elastic_agent.values import NAME_PATTERN, Endpoint

from .bootstrap import own_address, serve
from .plans import PlanReader, PlanWriter
from .store import CALL_TIMEOUT_S, StoreClient, store_errors
from .wire import probe_store

ROOT = "elastic-agent/1"
BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""
MAX_HINTS = 4096
"""So many hints are taken at once; the rest is taken the next time."""
MAX_STATUS_CHARS = 2048
MAX_RUNS_BYTES = 1024 * 1024
"""So much of the list of runs is read; runs beyond it make themselves known by hints."""
MOST_OPEN_FILES = 65536

_CLEARING = b"\x00"
"""Stands for a moment where an agreed run id was: it is about to be removed."""

_NAME = re.compile(NAME_PATTERN)

Complain = Callable[[str], None]


def _log_complaint(complaint: str) -> None:
    get_logger().warning("ignored an invalid record in the store", what=complaint)


# -- dialling and hosting ------------------------------------------------------------------------


def open_store(endpoint: Endpoint, timeout_s: float) -> tuple[StoreClient, str, str]:
    """A connection to the store at the endpoint, its id, and our own address on the way there.

    Raises:
        UnreachableError: nobody answers, or nobody answers in time.
        NotAStoreError: what answers is no store of ours.
        StoreLostError: it broke off in between.
    """
    probe = connect(endpoint.host, endpoint.port, timeout_s)
    try:
        local_address = local_address_towards(endpoint.host, probe)
        answering = str(probe.getpeername()[0])
        probe_store(probe, timeout_s, str(endpoint))
    finally:
        probe.close()
    client = StoreClient(answering, endpoint.port, timeout_s)
    return client, _store_id(client, endpoint), local_address


def _store_id(client: StoreClient, endpoint: Endpoint) -> str:
    """The id that our hosts write into their stores when they are born."""
    key = f"{ROOT}/id"
    data = client.peek_awaited(key)
    if data is None and client.wait(key, BIRTH_S):
        data = client.peek_awaited(key)
    name = _name(data or b"")
    if name is None:
        raise NotAStoreError(
            f"the store at {endpoint} was not created by elastic-agent (is a torchrun job using the "
            "port?); use another port, or stop that job"
        )
    return name


def dial(endpoint: Endpoint, run_id: str, timeout_s: float) -> C10dLink:
    """A node's link to a run at the endpoint; errors as for :func:`open_store`."""
    return C10dLink(*open_store(endpoint, timeout_s), run_id)


def find_or_host(endpoint: Endpoint, timeout_s: float) -> C10dHost | None:
    """Host the store if nobody does and the endpoint is this machine; None if somebody does.

    Raises:
        UnreachableError: nobody answers, and the endpoint is another machine.
        NotAStoreError: something else listens there.
    """
    if endpoint.port != 0:
        try:
            connect(endpoint.host, endpoint.port, timeout_s).close()
        except UnreachableError:
            if not is_local(resolve(endpoint.host)):
                raise
        else:
            return None
    try:
        sock = listen(endpoint.host, endpoint.port)
    except OSError as error:
        try:
            connect(endpoint.host, endpoint.port, timeout_s).close()  # another agent was quicker
        except UnreachableError:
            raise NotAStoreError(
                f"port {endpoint.port} of this machine cannot be used ({error.strerror}) and no store "
                "answers there; use another port"
            ) from None
        return None
    return C10dHost(sock)


def agree_run_id(endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float) -> str:
    """The run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    client, _, _ = open_store(endpoint, timeout_s)
    key = f"{ROOT}/default/{fingerprint}"
    agreed = client.exchange(key, b"", proposal.encode())
    while (name := _name(agreed)) is None:
        expected = b""
        if agreed != _CLEARING:  # nobody of ours wrote that
            _log_complaint(f"{key}: {agreed[:64]!r} is not a run id")
            expected = agreed
        agreed = client.exchange(key, expected, proposal.encode())
    jobs = f"{_prefix(name)}/jobs"
    if fingerprint not in _names(client.peek(jobs) or b""):
        _enlist(client, jobs, fingerprint)
        client.confirm()
    return name


def release_run_id(endpoint: Endpoint, fingerprint: str, run_id: str, timeout_s: float) -> None:
    """That run is over: the next job with this fingerprint is another run."""
    client, _, _ = open_store(endpoint, timeout_s)
    client.exchange(f"{ROOT}/default/{fingerprint}", run_id.encode(), b"")


class C10dHost:
    """The store's server in this process."""

    def __init__(self, sock: socket.socket) -> None:
        """Serve on a listening socket, which becomes the store's.

        Raises:
            StoreLostError: the server could not be made.
        """
        _allow_many_connections()
        self.port = int(sock.getsockname()[1])
        self.store_id = secrets.token_hex(8)
        self._address = own_address(sock)
        self._shared: StoreClient | None = None
        """The connection of all coordinator's links: a run that is only a name must cost nothing."""
        with store_errors():
            self._store: TCPStore | None = serve(sock)
            self._store.set(f"{ROOT}/id", self.store_id)

    def inbox(self) -> C10dInbox:
        """The coordinator's inbox, on connections of its own."""
        return C10dInbox(self._client(), self._client())

    def coordinator_link(self, run_id: str) -> C10dCoordinatorLink:
        """The coordinator's link to one run. All of them share a connection, and are used by one thread at a time."""
        if self._shared is not None:
            try:
                self._shared.confirm()
            except StoreLostError:
                self._shared = None
        if self._shared is None:
            self._shared = self._client()
        return C10dCoordinatorLink(self._shared, run_id)

    def _client(self) -> StoreClient:
        return StoreClient(self._address, self.port, CALL_TIMEOUT_S)

    def close(self) -> None:
        """Stop serving."""
        self._store = None


def _allow_many_connections() -> None:
    """Every node holds two connections to the host; the usual limit of 1024 open files would end at 500 nodes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


# -- the node's side -----------------------------------------------------------------------------


class C10dLink:
    """A node's connection to the store of one run (see ``NodeLink``)."""

    def __init__(
        self,
        client: StoreClient,
        store_id: str,
        local_address: str,
        run_id: str,
        complain: Complain = _log_complaint,
    ) -> None:
        """``complain`` is told of what is in the store and should not be."""
        self._client = client
        self._store_id = store_id
        self._local_address = local_address
        self._run_id = run_id
        self._prefix = _prefix(run_id)
        self._plans = PlanReader(client, self._prefix, complain)
        self._life = client.exchange(f"{self._prefix}/life", b"", secrets.token_hex(4).encode())
        self._written: dict[str, bytes] = {}
        """Each incarnation's member record as this connection knows it."""

    @property
    def store_id(self) -> str:
        """Random name of this life of the store, and of the run in it."""
        return f"{self._store_id}.{self._life.decode('ascii', 'replace')}"

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the store."""
        return self._local_address

    def register(self, member: Member, lease: Lease) -> Lease | None:
        """Write the records first, then the roster: whoever reads a name there finds its records.

        Raises:
            StoreLostError: also if an earlier run of this name was removed since this link was dialled; plan
                versions start anew then, as in a new store.
        """
        granted = self._claim(lease)
        if granted is None:
            return None
        name = member.incarnation
        if not self._replace(member, self._written.get(name, b"")):
            return None  # it was forgotten meanwhile
        if self._run_id not in _names(self._client.peek(f"{ROOT}/runs") or b""):
            _enlist(self._client, f"{ROOT}/runs", self._run_id)
        _enlist(self._client, f"{self._prefix}/roster", name)
        self._hint(name)
        if (
            self._client.peek(f"{self._prefix}/life") != self._life
        ):  # and all that was sent before has arrived
            raise StoreLostError("the store has removed the earlier run of this name")
        return granted

    def _claim(self, lease: Lease) -> Lease | None:
        """The lease as written: never over a revoked one, and never equal to an earlier one of this incarnation.

        The coordinator counts the time from when it saw a lease change; one written again must look changed.
        """
        key = f"{self._prefix}/l/{lease.incarnation}"
        while True:
            stored = self._client.peek(key)
            earlier = lease_in(stored, lease.incarnation)
            if stored == GONE or (earlier is not None and earlier.revoked):
                return None
            if earlier is not None:
                lease = msgspec.structs.replace(lease, beat=earlier.beat + 1)
            wanted = encode(lease)
            if self._client.exchange(key, stored or b"", wanted) == wanted:
                return lease

    def write(self, member: Member) -> None:
        """Replace the member record, if the incarnation is still known; a late write never undoes a newer one."""
        name = member.incarnation
        known = self._written.get(name)
        if known is None:  # an earlier connection registered it
            known = self._client.peek(f"{self._prefix}/m/{name}")
        if known is not None and known != GONE and self._replace(member, known):
            self._hint(name)

    def _replace(self, member: Member, known: bytes) -> bool:
        """Compare-and-set the member record, whatever else has been written since; False if it was forgotten.

        What sits in a connection that was given up can arrive any time later: by then it expects another record.
        """
        name, data = member.incarnation, encode(member)
        key = f"{self._prefix}/m/{name}"
        while (stored := self._client.exchange(key, known, data)) != data:
            if stored in (known, GONE):  # the first is what a missing key answers
                return False
            known = stored
        self._written[name] = data
        return True

    def _hint(self, incarnation: str) -> None:
        """Not confirmed: it is lost only with the connection, and over the next one the record is written again."""
        self._client.push(f"{ROOT}/inbox", f"{self._run_id} {incarnation}")

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease."""
        wanted = encode(renewed)
        key = f"{self._prefix}/l/{expected.incarnation}"
        return self._client.exchange(key, encode(expected), wanted) == wanted

    def read_lease(self, incarnation: str) -> Lease | None:
        """The lease as it stands, or None; also where something else was written over it."""
        return lease_in(self._client.peek(f"{self._prefix}/l/{incarnation}"), incarnation)

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def read_status(self) -> str:
        """What the coordinator waits for, in words."""
        text = (self._client.peek(f"{self._prefix}/status") or b"").decode("utf-8", "replace")
        return "".join(char if char.isprintable() else " " for char in text[:MAX_STATUS_CHARS])

    def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait for a newer plan; whoever fell behind gets the newest at once."""
        deadline_s = time.monotonic() + timeout_s
        while True:
            plan = self._plans.newest()
            if plan is not None and plan.version > after_version:
                return plan
            left_s = deadline_s - time.monotonic()
            following = max(self._plans.end, after_version) + 1
            if left_s <= 0 or not self._client.wait(self._plans.key(following), left_s):
                return None

    def close(self) -> None:
        """Let go of the connection; it closes when no call is under way any more."""
        self._client.close()


# -- the coordinator's side ----------------------------------------------------------------------


class C10dInbox:
    """Hints for the coordinator, over all runs of the store."""

    def __init__(
        self, waiting: StoreClient, asking: StoreClient, complain: Complain = _log_complaint
    ) -> None:
        self._waiting = waiting
        self._asking = asking
        self._complain = complain
        self._complained = False
        self._key = f"{ROOT}/inbox"

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Block until a hint comes; all that are there. Empty at the time-out, or when woken."""
        items = self._waiting.pop(self._key, timeout_s, MAX_HINTS)
        return [hint for item in dict.fromkeys(items) if (hint := self._hint(item)) is not None]

    def _hint(self, item: bytes) -> tuple[str, str] | None:
        if not item:
            return None  # only to wake us
        run_id, _, incarnation = item[:512].partition(b" ")
        names = _name(run_id), _name(incarnation)
        if names[0] is not None and names[1] is not None:
            return names[0], names[1]
        if not self._complained:  # once is enough: whoever writes there writes much
            self._complained = True
            self._complain(f"{self._key}: {item[:64]!r} is not a hint")
        return None

    def runs(self) -> tuple[str, ...]:
        """Every run that ever registered here."""
        return tuple(_names((self._asking.peek(f"{ROOT}/runs") or b"")[:MAX_RUNS_BYTES]))

    def strike(self, run_id: str) -> None:
        """Take a removed run off that list."""
        key = f"{ROOT}/runs"
        while run_id in _names(listed := self._asking.peek(key) or b""):
            others = [name for name in _names(listed) if name != run_id]
            self._asking.exchange(key, listed, "".join(f"\n{name}\n" for name in others).encode())

    def wake(self) -> None:
        """Wake the waiting thread (from another one)."""
        self._asking.push(self._key, "")


class C10dCoordinatorLink:
    """The coordinator's connection to one run (see ``CoordinatorLink``)."""

    def __init__(self, client: StoreClient, run_id: str, complain: Complain = _log_complaint) -> None:
        self._client = client
        self._prefix = _prefix(run_id)
        self._plans = PlanReader(client, self._prefix, complain)
        self._writer = PlanWriter(client, self._prefix, self._plans)
        self._known: dict[str, None] = {}
        """Everybody on the roster who is not forgotten, in its order."""
        self._roster_read = 0
        self._forgotten: set[str] = set()
        self._records = RecordReader(self._prefix)

    def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Records of these incarnations, or of all. A bad one is described once for each content."""
        names = self._everybody() if incarnations is None else list(incarnations)
        keys = [f"{self._prefix}/{kind}/{name}" for name in names for kind in "ml"]
        found = self._client.peek_many(keys)
        rejected: list[str] = []
        members: dict[str, Member] = {}
        for name in names:
            data = found.get(f"{self._prefix}/m/{name}", GONE)
            member = self._records.member(name, data, rejected)
            if member is not None:
                members[name] = member
                self._known.setdefault(
                    name
                )  # the roster's line of one that came while it was removed is lost
        leases = self._records.leases(self._leases_in(names, found), rejected)
        return Snapshot(members, leases, tuple(rejected))

    def _leases_in(self, names: Collection[str], found: Mapping[str, bytes]) -> dict[str, bytes]:
        return {name: found.get(f"{self._prefix}/l/{name}", GONE) for name in names}

    def read_leases(self) -> Mapping[str, Lease]:
        """All leases."""
        names = self._everybody()
        found = self._client.peek_many([f"{self._prefix}/l/{name}" for name in names])
        return self._records.leases(self._leases_in(names, found), None)

    def _everybody(self) -> list[str]:
        """The roster only grows: what is new of it is read."""
        roster = self._client.peek(f"{self._prefix}/roster") or b""
        if len(roster) < self._roster_read:
            self._roster_read = 0  # somebody wrote over it; whom we know we know
        for name in _names(roster[self._roster_read :]):
            if name not in self._forgotten:
                self._known.setdefault(name)
        self._roster_read = len(roster)
        return list(self._known)

    def has_begun(self) -> bool:
        """Whether a node has registered, or a plan is there; else the run is only a name."""
        return bool(self.read(None).members) or self.read_plan() is not None

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def publish(self, plan: Plan) -> bool:
        """The first writer of a version wins."""
        return self._writer.publish(plan)

    def revoke(self, lease: Lease, why: str = "") -> bool:
        """Compare-and-set the lease to its revoked form."""
        key = f"{self._prefix}/l/{lease.incarnation}"
        wanted = encode(lease.revoke(why))
        stored = self._client.exchange(key, encode(lease), wanted)
        if stored != wanted and stored != encode(lease) and lease_in(stored, lease.incarnation) == lease:
            stored = self._client.exchange(key, stored, wanted)  # the same, spelled otherwise
        return stored == wanted

    def write_status(self, text: str) -> None:
        """Say in words what is awaited."""
        self._client.put(f"{self._prefix}/status", text[:MAX_STATUS_CHARS].encode("utf-8", "replace"))

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records, for good."""
        self._known.pop(incarnation, None)
        self._forgotten.add(incarnation)
        for kind in "lm":
            self._client.put(f"{self._prefix}/{kind}/{incarnation}", GONE)

    def remove_run(self) -> bool:
        """Remove everything of a run that nobody needs any more; False if somebody new has come.

        The run's life ends first: who registers meanwhile notices that at the end, and begins anew; who had
        registered before is on the roster.
        """
        self._client.delete([f"{self._prefix}/life"])
        roster = _names(self._client.peek(f"{self._prefix}/roster") or b"")
        if not {*roster} <= self._known.keys() | self._forgotten:
            return False
        self._writer.remove_all()
        self._release_jobs()
        records = [f"{self._prefix}/{kind}/{name}" for name in {*roster, *self._known} for kind in "ml"]
        self._client.delete([*records, *(f"{self._prefix}/{name}" for name in ("status", "jobs", "roster"))])
        return True

    def _release_jobs(self) -> None:
        """Remove what says that a job's run is this one; what says that it is another one stays."""
        run_id = self._prefix.rpartition("/")[2].encode()
        for fingerprint in _names(self._client.peek(f"{self._prefix}/jobs") or b""):
            key = f"{ROOT}/default/{fingerprint}"
            for expected in (run_id, b""):
                if self._client.exchange(key, expected, _CLEARING) == _CLEARING:
                    self._client.delete([key])
                    break


# -- names ---------------------------------------------------------------------------------------


def _prefix(run_id: str) -> str:
    return f"{ROOT}/r/{run_id}"


def _name(data: bytes) -> str | None:
    """A run id, an incarnation or a store id, if it is one."""
    text = data.decode("ascii", "replace")
    return text if _NAME.fullmatch(text) else None


def _names(data: bytes) -> list[str]:
    """The lines of a roster that are names, each once; what else was appended is skipped."""
    names = (_name(line) for line in data.split(b"\n"))
    return list(dict.fromkeys(name for name in names if name is not None))


def _enlist(client: StoreClient, roster: str, name: str) -> None:
    """Add a line; it begins with a line's end, should anybody have left one unfinished."""
    client.append(roster, f"\n{name}")


__all__ = [
    "C10dCoordinatorLink",
    "C10dHost",
    "C10dInbox",
    "C10dLink",
    "TransportError",
    "agree_run_id",
    "dial",
    "find_or_host",
    "open_store",
    "release_run_id",
]
