"""A c10d store as its clients see it: keys and bytes, which the shipped links read and write.

What is real here, beside the drivers: ``C10dLink`` and ``C10dCoordinatorLink`` with their readers and writers of plans,
``StoreClient``, the sealing of records, and how nodes and coordinator greet each other. Only the connection to
torch's server is simulated (:class:`Client`), each of its calls as a message of the network.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, Protocol, cast

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import Lease, Plan
from elastic_agent.transport.c10d import StoreClient
from elastic_agent.transport.c10d.coordinator_link import C10dInbox
from elastic_agent.transport.c10d.greeting import HELLO, Doorkeeper, announce
from elastic_agent.transport.c10d.keys import ROOT, names_in, run_prefix
from elastic_agent.transport.c10d.store import CALL_TIMEOUT_S, RecordFormat
from elastic_agent.transport.c10d.tcpstore import TCPStoreConnection
from elastic_agent.transport.record_reader import GONE
from elastic_agent.transport.sealing import ID_BYTES, MAGIC, SEQUENCE_BYTES, TAG_BYTES, Secret, Unverified

from . import fibers
from .kernel import Inbox, Routine
from .network import Connection
from .store import Answer, Store, readable

if TYPE_CHECKING:
    from .checker import Checker

RUN = "run"
SECRET = Secret((b"the secret of the run",))
PREFIX = run_prefix(RUN)
INBOX = f"{ROOT}/inbox"
HEAD_BYTES = len(MAGIC) + ID_BYTES + TAG_BYTES + SEQUENCE_BYTES
SEALED = re.compile(rf"{PREFIX}/(?:(?:m|l|plan|report)/[^/]+|status)")
"""Keys whose content counts only if an agent of the run wrote it."""
NUMBERED = re.compile(rf"{PREFIX}/[ml]/[^/]+")
"""Keys under which the coordinator takes nothing that is older than what it took before."""


class KeyedStore(Store):
    """One life of such a store."""

    prefix = PREFIX
    sealed, numbered = SEALED, NUMBERED

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.data: dict[str, bytes] = {}
        self.doorkeeper = Doorkeeper(SECRET)
        self.doorkeeper._lock = VirtualLock(self.process.kernel)  # type: ignore[assignment]
        self.draft: Plan | None = None
        """What the coordinator is about to publish."""
        self.written: dict[str, dict[bytes, int]] = {}
        """Key → what agents of the run wrote there in this life of it, and when last (a count)."""
        self.forgers = self.checker.cluster.forgers
        self._writes = 0
        self._awaited: dict[str, list[Answer]] = {}
        self._greetings = Inbox(self.process.kernel)
        announce(opened(Direct(self)), SECRET)
        self.process.spawn(self._greet())

    def _greet(self) -> Routine:
        """Answer greetings as they come."""
        client = opened(Client(self.connect(self.machine)))
        while True:
            item = yield self._greetings, None
            yield from fibers.blocking(partial(self.doorkeeper.answer, client, item))

    def serve(self, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one request."""
        if method == "await_key":
            self._await(args[0], answer)
        else:
            answer(getattr(self, method)(*args))

    # -- what clients ask -----------------------------------------------------------------------

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        """As torch's: what is there afterwards, but for a missing key what was expected of it."""
        there = self.data.get(key)
        if there == expected or (there is None and not expected):
            self._set(key, desired)
            there = desired
        else:
            self._wake(key)
        return expected if there is None else there

    def set(self, key: str, value: bytes) -> None:
        self._set(key, value)

    def append(self, key: str, value: bytes) -> None:
        self._set(key, self.data.get(key, b"") + value)

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return [self.data.get(key, b"") for key in keys]

    def get_if_there(self, key: str) -> bytes | None:
        return self.data.get(key)

    def ping(self) -> None:
        """All that was sent before is carried out by now."""

    def delete_key(self, key: str) -> bool:
        there = self.data.pop(key, None) is not None
        self._took(key)
        return there

    def push(self, queue: str, item: bytes) -> None:
        """A hint, or a greeting."""
        if queue != INBOX:
            return
        if item.startswith(HELLO):
            self._greetings.put(item)
            return
        hint = C10dInbox._hint(cast(C10dInbox, _QuietInbox()), item)
        if hint is not None:
            self.hint(hint[1])

    def _await(self, key: str, answer: Answer) -> None:
        """An answer as soon as the key is there."""
        if key in self.data:
            answer(True)
        else:
            self._awaited.setdefault(key, []).append(answer)

    def _wake(self, key: str) -> None:
        """Like torch's store, also if the key is still missing."""
        for answer in self._awaited.pop(key, ()):
            answer(True)

    # -- what is true ---------------------------------------------------------------------------

    def _set(self, key: str, value: bytes) -> None:
        before = self.data.get(key)
        self.data[key] = value
        if SEALED.fullmatch(key):
            self._writes += 1
            record = value[HEAD_BYTES:] if value.startswith(MAGIC) else value
            self.written.setdefault(key, {})[record] = self._writes
        self._took(key)
        if self.forgers is not None:
            self.forgers.record(self, key, value)
        self._wake(key)
        if value == before:
            return
        kind, _, name = key.removeprefix(f"{PREFIX}/").partition("/")
        if kind == "l" and name in self.leases:
            lease = decode(Lease, self.leases[name])
            if lease.revoked:
                self.checker.revoked(self, lease)
            else:
                self.checker.renewed(name)
        elif kind == "plan" and self.draft is not None and name == str(self.draft.version):
            plan, self.draft = self.draft, None
            self._published(plan)

    def _published(self, plan: Plan) -> None:
        before = decode(Plan, self.plan) if self.plan is not None else None
        self.plan, self.version = encode(plan), plan.version
        self.checker.published(self, before, plan)

    def _took(self, key: str) -> None:
        """Have ``members`` and ``leases`` hold what of it counts."""
        kind, _, name = key.removeprefix(f"{PREFIX}/").partition("/")
        if not name or kind not in ("m", "l") or not key.startswith(PREFIX):
            return
        record = self.counts(key)
        if kind == "l" and record is not None and not isinstance(readable(Lease, record), Lease):
            record = None
        kept = self.members if kind == "m" else self.leases
        if record is None:
            kept.pop(name, None)
        else:
            kept[name] = record

    def counts(self, key: str) -> bytes | None:
        """The record under this key if it verifies, and an incarnation's is not forgotten."""
        data = self.data.get(key, b"")
        record = self.doorkeeper.seals(RUN).seal.open(key, data)
        return None if isinstance(record, Unverified) or record == GONE else record

    def removed(self) -> None:
        """The coordinator has removed the run."""
        self.plan, self.version, self.life = None, 0, None
        for kept in (self.written, self.members, self.leases):
            kept.clear()  # what is left of them is of another epoch
        self.checker.cluster.story("store", "the run is removed")

    # -- what other clients do ------------------------------------------------------------------

    def scribble(self, name: str, member: bytes, lease: bytes) -> None:
        for kind, record in (("m", member), ("l", lease)):
            self.tamper(f"{PREFIX}/{kind}/{name}", record)
        self.hint(name)

    def tamper(self, key: str, value: bytes | None) -> None:
        """Write this, or delete the key."""
        if value is None:
            self.data.pop(key, None)
        else:
            self.data[key] = value
            self._wake(key)
        if NUMBERED.fullmatch(key):
            self.tampered.add(key.rpartition("/")[2])
        if value is not None and "/l/" in key:
            self._may_revive(key, value)
        self._took(key)

    def _may_revive(self, key: str, value: bytes) -> None:
        """Note the lease if the coordinator cannot know that it is not the newest."""
        seals = self.doorkeeper.seals(RUN)
        record, number = seals.seal.open_numbered(key, value)
        if not isinstance(record, Unverified) and number >= seals.newest.get(key, 0):
            self.revived.add(key.rpartition("/")[2])

    def enlist(self, name: str) -> None:
        """Put this incarnation on the roster."""
        roster = self.data.get(f"{PREFIX}/roster", b"")
        self.tamper(f"{PREFIX}/roster", roster + f"\n{name}\n".encode())

    def notify(self, name: str) -> None:
        """Have the coordinator read the records of this incarnation."""
        self.push(INBOX, f"{RUN} {name}".encode())

    def names(self) -> list[str]:
        """Incarnations on the roster."""
        return names_in(self.data.get(f"{PREFIX}/roster", b""))


class _QuietInbox:
    """Stands for the coordinator's inbox where a hint is read."""

    _reported = True


class VirtualLock:
    """A lock between pieces of blocking code."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel
        self._holder: object = None
        self._depth = 0
        self._queue: list[Inbox] = []

    def __enter__(self) -> None:
        me = fibers.current()
        while me is not None and self._holder not in (None, me):
            freed = Inbox(self._kernel)
            self._queue.append(freed)
            fibers.wait_for(_next_of(freed))
        if me is not None:
            self._holder = me
            self._depth += 1

    def __exit__(self, *error: object) -> None:
        if fibers.current() is None:
            return
        self._depth -= 1
        if self._depth == 0:
            self._holder = None
            queue, self._queue = self._queue, []
            for freed in queue:
                freed.put(None)


def _next_of(inbox: Inbox) -> Routine:
    return (yield inbox, None)


class Client:
    """The client of a TCPStore over a simulated connection."""

    def __init__(self, connection: Connection) -> None:
        self.connection = connection

    def _call(self, method: str, *args: Any) -> Any:
        return fibers.wait_for(self.connection.call(method, *args, timeout_s=CALL_TIMEOUT_S))

    def compare_set(self, key: str, expected: bytes, desired: bytes) -> bytes:
        return cast(bytes, self._call("compare_set", key, expected, desired))

    def get(self, keys: Sequence[str]) -> list[bytes]:
        return cast("list[bytes]", self._call("get", tuple(keys)))

    def get_if_there(self, key: str) -> bytes | None:
        return cast("bytes | None", self._call("get_if_there", key))

    def ping(self) -> None:
        self._call("ping")

    def wait(self, key: str, timeout_s: float) -> bool:
        found = fibers.wait_for(self.connection.wait("await_key", key, timeout_s=timeout_s))
        return found is not None

    def set(self, key: str, value: bytes) -> None:
        self.connection.tell("set", key, value)

    def append(self, key: str, value: bytes) -> None:
        self.connection.tell("append", key, value)

    def queue_push(self, queue: str, item: bytes) -> None:
        self.connection.tell("push", queue, item)

    def delete_key(self, key: str) -> bool:
        return cast(bool, self._call("delete_key", key))

    def close(self) -> None:
        self.connection.close()


class Direct:
    """The client of a TCPStore, for what happens within one moment."""

    def __init__(self, store: KeyedStore) -> None:
        self.set = store.set


class WatchedClient(StoreClient):
    """The shipped client, whose records are checked as they are taken and given."""

    watch: Callable[[RecordFormat], RecordFormat] = staticmethod(lambda records: records)

    def storing(self, records: RecordFormat) -> StoreClient:
        return super().storing(self.watch(records))


def opened(
    client: Client | Direct, watch: Callable[[RecordFormat], RecordFormat] | None = None
) -> StoreClient:
    """The shipped client over this connection."""
    made = WatchedClient(cast(TCPStoreConnection, client))
    if watch is not None:
        made.watch = watch
    return made


class Truth(Protocol):
    """What agents of the run have written."""

    checker: Checker
    written: dict[str, dict[bytes, int]]
    """Key → what they wrote there, and when last (a count)."""
    sealed: re.Pattern[str]
    """Keys whose content counts only if an agent of the run wrote it."""
    numbered: re.Pattern[str]
    """Keys under which nothing counts that is older than what was taken before."""


class Watched:
    """Records as the run stores them; requires that nothing counts but what its agents have written."""

    def __init__(self, records: RecordFormat, truth: Truth, who: str, *, in_order: bool) -> None:
        """``in_order``: nothing counts that is older than what was taken before (in c10d at the coordinator)."""
        self._records, self._truth, self._who, self._in_order = records, truth, who, in_order
        self._newest: dict[str, int] = {}

    def closed(self, key: str, record: bytes) -> bytes:
        """The bytes to store."""
        self._truth.written.setdefault(key, {}).setdefault(record, 0)  # it is counted when it arrives
        return self._records.closed(key, record)

    def expected(self, key: str, record: bytes) -> bytes:
        """The bytes that are stored if this record is still there."""
        return self._records.expected(key, record)

    def newest(self, key: str) -> int:
        """The highest number seen under this key."""
        return self._records.newest(key)

    def opened(self, key: str, data: bytes) -> bytes:
        """The record in them."""
        record = self._records.opened(key, data)
        if isinstance(record, Unverified) or not data or not self._truth.sealed.fullmatch(key):
            return record
        written = self._truth.written.get(key, {})
        require = self._truth.checker.require
        require(
            record in written,
            "only what an agent of the run wrote there counts",
            f"{self._who} takes {key}: {record[:80]!r}",
        )
        if self._in_order and self._truth.numbered.fullmatch(key):
            # A lease that was revoked stays so, and a node that was forgotten, too: nothing newer counts instead. (In
            # etcd, a new coordinator may have revoked an earlier lease again that was written back.)
            is_final = record == GONE or b'"revoked":true' in record
            older = 0 < written[record] < self._newest.get(key, 0) and not is_final
            require(not older, "no earlier record counts", f"{self._who} takes {key}: {record[:200]!r}")
            self._newest[key] = max(self._newest.get(key, 0), written[record])
        return record
