"""The c10d store as transport: the server in one agent's process, and everybody's links to it.

Keys, all under ``elastic-agent/1/``:

    id                       random name of this store's life
    runs                     every run id that ever registered, one a line (append)
    inbox                    queue of "<run id> <incarnation>": hints for the coordinator
    default/<fingerprint>    the run id agreed for a job that gave none
    r/<run>/roster           every incarnation that ever registered, one a line (append)
    r/<run>/m/<incarnation>  member record        r/<run>/l/<incarnation>  lease
    r/<run>/plan/<version>   plan without its world; the first writer of a version wins
    r/<run>/latest           newest plan version   r/<run>/world/<digest>  a world, by content
    r/<run>/status           what the coordinator waits for, in words

A plan is published by compare-and-set on the key of its version, so the version before is what it follows;
waiters block on the key of the next one. Worlds lie apart, by digest: a plan stays small, and a world
that a link has seen is not read again.
"""

from __future__ import annotations

import hashlib
import secrets
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar, cast

import msgspec
from torch._C._distributed_c10d import TCPStore
from torch.distributed import DistStoreError

from elastic_agent.config.values import Endpoint
from elastic_agent.protocol.records import (
    Lease,
    Member,
    Plan,
    RecordError,
    World,
    decode,
    encode,
)

from .addresses import connect, is_local, listen, local_address_towards, resolve
from .base import NotAStoreError, Snapshot, StoreLostError, TransportError, UnreachableError
from .bootstrap import one_line, serve
from .wire import greet

T = TypeVar("T", Member, Lease)

ROOT = "elastic-agent/1"
KEPT_PLANS = 16
CALL_TIMEOUT_S = 10.0
BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""
MAX_ROSTER_BYTES = 4 * 1024 * 1024


@contextmanager
def _store_errors() -> Iterator[None]:
    """torch's errors as ours, one line each."""
    try:
        yield
    except RuntimeError as error:  # DistNetworkError and DistStoreError among them
        raise StoreLostError(one_line(error)) from None


def _client(endpoint: Endpoint, timeout_s: float) -> TCPStore:
    limit = timedelta(seconds=timeout_s)
    store = TCPStore(endpoint.host, endpoint.port, None, False, limit, wait_for_workers=False)
    store.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
    return store


# -- dialling and hosting ------------------------------------------------------------------------


def open_store(endpoint: Endpoint, timeout_s: float) -> tuple[TCPStore, str, str]:
    """A connection to the store at the endpoint, its id, and our own address on the way there.

    Raises:
        UnreachableError: nobody answers, or nobody answers in time.
        NotAStoreError: what answers is no store of ours.
    """
    probe = connect(endpoint.host, endpoint.port, timeout_s)
    try:
        local_address = local_address_towards(endpoint.host, probe)
        greet(probe, timeout_s, str(endpoint))
    finally:
        probe.close()
    try:
        store = _client(endpoint, timeout_s)
        store_id = _store_id(store, endpoint)
    except RuntimeError as error:  # it answered a moment ago
        raise StoreLostError(one_line(error)) from None
    return store, store_id, local_address


def _store_id(store: TCPStore, endpoint: Endpoint) -> str:
    """The id that our hosts write into their stores when they are born."""
    key = f"{ROOT}/id"
    try:
        store.wait([key], timedelta(seconds=BIRTH_S))
    except DistStoreError:
        if store.check([key]):
            return store.get(key).decode("ascii", "replace")
        raise NotAStoreError(
            f"the store at {endpoint} is not one of elastic-agent's (that of a torchrun job?); "
            "use another port, or stop that job"
        ) from None
    return store.get(key).decode("ascii", "replace")


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
                f"port {endpoint.port} of this machine cannot be used ({error.strerror}) and nobody answers "
                "there; use another port"
            ) from None
        return None
    return C10dHost(endpoint, sock.getsockname()[1], serve(sock))


def agree_run_id(endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float) -> str:
    """The run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    store, _, _ = open_store(endpoint, timeout_s)
    with _store_errors():
        agreed = store.compare_set(f"{ROOT}/default/{fingerprint}", "", proposal)
    return _text(agreed, proposal)


def _text(data: bytes, otherwise: str) -> str:
    """A run id out of the store, if it is one."""
    text = data.decode("ascii", "replace")
    return text if _is_name(text) and " " not in text else otherwise


class C10dHost:
    """The store's server in this process."""

    def __init__(self, endpoint: Endpoint, port: int, store: TCPStore) -> None:
        self.port = port
        self._endpoint = Endpoint(endpoint.host, port)
        self._store: TCPStore | None = store
        self.store_id = secrets.token_hex(8)
        store.set(f"{ROOT}/runs", "")
        store.set(f"{ROOT}/id", self.store_id)

    def inbox(self) -> C10dInbox:
        """The coordinator's inbox, on a connection of its own."""
        return C10dInbox(*self._connections(2))

    def coordinator_link(self, run_id: str) -> C10dCoordinatorLink:
        """The coordinator's link to one run, on a connection of its own."""
        return C10dCoordinatorLink(self._connections(1)[0], run_id)

    def _connections(self, count: int) -> list[TCPStore]:
        """Connections over loopback: the server is in this process."""
        with _store_errors():
            return [_client(Endpoint("127.0.0.1", self.port), CALL_TIMEOUT_S) for _ in range(count)]

    def close(self) -> None:
        """Stop serving."""
        self._store = None


# -- the node's side -----------------------------------------------------------------------------


class _Plans:
    """Reads plans of one run and puts their worlds back in."""

    def __init__(self, store: TCPStore, run_id: str) -> None:
        self._store = store
        self.prefix = f"{ROOT}/r/{run_id}"
        self._worlds: dict[str, World] = {}

    def newest(self) -> Plan | None:
        with _store_errors():
            version = self._latest()
            while version:
                key = f"{self.prefix}/plan/{version}"
                if self._store.check([key]):
                    return self._parse(self._store.get(key))
                version = self._latest()  # it was removed in between: there is a newer one
        return None

    def _latest(self) -> int:
        key = f"{self.prefix}/latest"
        return int(self._store.get(key)) if self._store.check([key]) else 0

    def _parse(self, data: bytes) -> Plan:
        digest, _, body = data.partition(b"\n")
        try:
            plan = decode(Plan, body)
            return (
                msgspec.structs.replace(plan, world=self._world(digest.decode("ascii"))) if digest else plan
            )
        except (RecordError, UnicodeDecodeError) as error:
            raise StoreLostError(f"the plan in the store cannot be read: {error}") from None

    def _world(self, digest: str) -> World:
        world = self._worlds.get(digest)
        if world is None:
            world = decode(World, self._store.get(f"{self.prefix}/world/{digest}"))
            self._worlds = {**dict(list(self._worlds.items())[-3:]), digest: world}
        return world


class C10dLink:
    """A node's connection to the store of one run (see :class:`~.base.NodeLink`)."""

    def __init__(self, store: TCPStore, store_id: str, local_address: str, run_id: str) -> None:
        self._store = store
        self._store_id = store_id
        self._local_address = local_address
        self._run_id = run_id
        self._plans = _Plans(store, run_id)
        self._prefix = self._plans.prefix

    @property
    def store_id(self) -> str:
        """Random name of this life of the store."""
        return self._store_id

    @property
    def local_address(self) -> str:
        """This machine's address on the way to the store."""
        return self._local_address

    def register(self, member: Member, lease: Lease) -> None:
        """Write the records first, then the roster: whoever reads a name there finds its records."""
        name = member.incarnation
        with _store_errors():
            self._store.set(f"{self._prefix}/l/{name}", encode(lease).decode())
            self._store.set(f"{self._prefix}/m/{name}", encode(member).decode())
            _append(self._store, f"{self._prefix}/roster", name)
            runs = self._store.get(f"{ROOT}/runs").decode("ascii", "replace").split("\n")
            if self._run_id not in runs:
                _append(self._store, f"{ROOT}/runs", self._run_id)
            self._hint(name)

    def write(self, member: Member) -> None:
        """Replace the member record and hint to the coordinator."""
        with _store_errors():
            self._store.set(f"{self._prefix}/m/{member.incarnation}", encode(member).decode())
            self._hint(member.incarnation)

    def _hint(self, incarnation: str) -> None:
        self._store.queue_push(f"{ROOT}/inbox", f"{self._run_id} {incarnation}")

    def renew(self, expected: Lease, renewed: Lease) -> bool:
        """Compare-and-set the lease."""
        with _store_errors():
            return _exchange(self._store, f"{self._prefix}/l/{expected.incarnation}", expected, renewed)

    def read_lease(self, incarnation: str) -> Lease | None:
        """The lease as it stands, or None."""
        key = f"{self._prefix}/l/{incarnation}"
        with _store_errors():
            if not self._store.check([key]):
                return None
            data = self._store.get(key)
        try:
            return decode(Lease, data)
        except RecordError:
            return None  # somebody overwrote it: it is ours no more

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def read_status(self) -> str:
        """What the coordinator waits for, in words."""
        key = f"{self._prefix}/status"
        with _store_errors():
            if not self._store.check([key]):
                return ""
            return self._store.get(key)[:2048].decode("utf-8", "replace")

    def next_plan(self, after_version: int, timeout_s: float) -> Plan | None:
        """Wait for a newer plan; whoever fell behind gets the newest at once."""
        newest = self._plans.newest()
        if newest is not None and newest.version > after_version:
            return newest
        key = f"{self._prefix}/plan/{(newest.version if newest is not None else 0) + 1}"
        try:
            self._store.wait([key], timedelta(seconds=timeout_s))
        except DistStoreError:
            return None  # the time-out; the connection stays usable
        except RuntimeError as error:
            raise StoreLostError(one_line(error)) from None
        return self._plans.newest() or None

    def close(self) -> None:
        """Let go of the connection; it closes when no call is under way any more."""


def _append(store: TCPStore, key: str, name: str) -> None:
    """Add a line to a roster, in one step on the server."""
    cast(Any, store).append(key, f"{name}\n")  # torch's stubs do not know it


def _exchange(store: TCPStore, key: str, expected: Lease, desired: Lease) -> bool:
    """Compare-and-set. A missing key answers with what was expected, so only the desired value tells success."""
    wanted = encode(desired)
    return store.compare_set(key, encode(expected).decode(), wanted.decode()) == wanted


# -- the coordinator's side ----------------------------------------------------------------------


class C10dInbox:
    """Hints for the coordinator, over all runs of the store."""

    def __init__(self, waiting: TCPStore, asking: TCPStore) -> None:
        self._waiting = waiting
        self._asking = asking
        self._key = f"{ROOT}/inbox"
        self._runs: tuple[str, ...] = ()

    def wait(self, timeout_s: float) -> list[tuple[str, str]]:
        """Block until a hint comes; all that are there. Empty at the time-out."""
        try:
            self._waiting.set_timeout(timedelta(seconds=timeout_s))
            items = [self._waiting.queue_pop(self._key)]
        except DistStoreError:
            return []
        except RuntimeError as error:
            raise StoreLostError(one_line(error)) from None
        with _store_errors():
            # What is there is fetched without hurry: the time-out above may have been a millisecond.
            self._waiting.set_timeout(timedelta(seconds=CALL_TIMEOUT_S))
            count = self._waiting.queue_len(self._key)
            items += [self._waiting.queue_pop(self._key, block=False) for _ in range(count)]
        hints = [item.decode("ascii", "replace").split(" ") for item in items if len(item) < 512]
        return [(hint[0], hint[1]) for hint in hints if len(hint) == 2 and all(map(_is_name, hint))]

    def runs(self) -> tuple[str, ...]:
        """Every run that ever registered here."""
        with _store_errors():
            names = _names(self._asking.get(f"{ROOT}/runs"))
        return tuple(names)

    def wake(self) -> None:
        """Wake the waiting thread (from another one)."""
        with _store_errors():
            self._asking.queue_push(self._key, "-")


def _is_name(text: str) -> bool:
    return 0 < len(text) <= 128 and text.isascii() and text.isprintable()


def _names(data: bytes) -> list[str]:
    """The lines of a roster that are names, each once; what else was appended is skipped."""
    lines = data[:MAX_ROSTER_BYTES].decode("ascii", "replace").split("\n")
    return list(dict.fromkeys(line for line in lines if _is_name(line)))


class C10dCoordinatorLink:
    """The coordinator's connection to one run (see :class:`~.base.CoordinatorLink`)."""

    def __init__(self, store: TCPStore, run_id: str) -> None:
        self._store = store
        self._plans = _Plans(store, run_id)
        self._prefix = self._plans.prefix
        self._forgotten: set[str] = set()

    def read(self, incarnations: Collection[str] | None) -> Snapshot:
        """Records of these incarnations, or of all."""
        with _store_errors():
            names = self._present(self._everybody() if incarnations is None else incarnations)
            members = self._get("m", names)
            leases = self._get("l", names)
        rejected: list[str] = []
        return Snapshot(
            _decoded(Member, members, rejected, lambda record: record.incarnation),
            _decoded(Lease, leases, rejected, lambda record: record.incarnation),
            tuple(rejected),
        )

    def read_leases(self) -> Mapping[str, Lease]:
        """All leases."""
        with _store_errors():
            leases = self._get("l", self._present(self._everybody()))
        return _decoded(Lease, leases, [], lambda record: record.incarnation)

    def _everybody(self) -> list[str]:
        key = f"{self._prefix}/roster"
        if not self._store.check([key]):
            return []
        return [name for name in _names(self._store.get(key)) if name not in self._forgotten]

    def _present(self, names: Collection[str]) -> list[str]:
        """Those that have both records: reading a missing key would block."""
        known = [name for name in names if name not in self._forgotten]
        keys = [f"{self._prefix}/{kind}/{name}" for name in known for kind in "ml"]
        if not keys or self._store.check(keys):
            return known
        return [
            name
            for name in known
            if self._store.check([f"{self._prefix}/m/{name}", f"{self._prefix}/l/{name}"])
        ]

    def _get(self, kind: str, names: list[str]) -> dict[str, bytes]:
        if not names:
            return {}
        values = self._store.multi_get([f"{self._prefix}/{kind}/{name}" for name in names])
        return dict(zip(names, values, strict=True))

    def read_plan(self) -> Plan | None:
        """The newest plan, or None before the first."""
        return self._plans.newest()

    def publish(self, plan: Plan) -> bool:
        """The first writer of a version wins."""
        digest = ""
        with _store_errors():
            if plan.world is not None:
                body = encode(plan.world)
                digest = hashlib.sha256(body).hexdigest()[:32]
                self._store.set(f"{self._prefix}/world/{digest}", body.decode())
            data = f"{digest}\n" + encode(msgspec.structs.replace(plan, world=None)).decode()
            key = f"{self._prefix}/plan/{plan.version}"
            if self._store.compare_set(key, "", data) != data.encode():
                return False
            self._store.set(f"{self._prefix}/latest", str(plan.version))
            self._store.delete_key(f"{self._prefix}/plan/{plan.version - KEPT_PLANS}")
        return True

    def condemn(self, lease: Lease) -> bool:
        """Compare-and-set the lease to its condemned form."""
        with _store_errors():
            return _exchange(self._store, f"{self._prefix}/l/{lease.incarnation}", lease, lease.condemn())

    def write_status(self, text: str) -> None:
        """Say in words what is awaited."""
        with _store_errors():
            self._store.set(f"{self._prefix}/status", text[:2048])

    def forget(self, incarnation: str) -> None:
        """Remove an incarnation's records."""
        self._forgotten.add(incarnation)
        with _store_errors():
            self._store.delete_key(f"{self._prefix}/m/{incarnation}")
            self._store.delete_key(f"{self._prefix}/l/{incarnation}")


def _decoded(
    kind: type[T], records: Mapping[str, bytes], rejected: list[str], name_of: Callable[[T], str]
) -> dict[str, T]:
    """The good records; the bad ones are described."""
    good: dict[str, T] = {}
    for name, data in records.items():
        try:
            record = decode(kind, data)
        except RecordError as error:
            rejected.append(f"{kind.__name__.lower()} of {name}: {error}")
            continue
        if name_of(record) == name:
            good[name] = record
        else:
            rejected.append(f"{kind.__name__.lower()} of {name}: it says that it is {name_of(record)}'s")
    return good


__all__ = [
    "C10dCoordinatorLink",
    "C10dHost",
    "C10dInbox",
    "C10dLink",
    "TransportError",
    "agree_run_id",
    "dial",
    "find_or_host",
]
