"""An etcd as its clients see it: keys with revisions, transactions, leases and watches.

The shipped client and everything above it run on it. Simulated is gRPC: each call of a channel, and each answer of a
watch, is a message of the network (:class:`Channel`, :class:`Stream`). Requests are etcd's own messages.
"""

from __future__ import annotations

import math
import re
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import Lease, Plan
from elastic_agent.transport.etcd import RunKeys
from elastic_agent.transport.etcd.api import grpc, rpc
from elastic_agent.transport.etcd.leadership import LEADER_LEASES, LEAST_LEADER_S
from elastic_agent.transport.etcd.link import KEPT_LEASES, LEAST_KEPT_S
from elastic_agent.transport.etcd.sealed import RunLife
from elastic_agent.transport.record_reader import GONE
from elastic_agent.transport.sealing import MAGIC, Seal, Unverified
from elastic_agent.values import EtcdAccess

from . import fibers
from .etcd import Etcd, EtcdConnection
from .kernel import Inbox, Routine
from .keyed import HEAD_BYTES, RUN, SECRET
from .network import BROKEN
from .store import Answer, readable

if TYPE_CHECKING:
    from .checker import Checker
    from .machine import Machine

ACCESS = EtcdAccess()
_KEYS = RunKeys(ACCESS.prefix, RUN)
PREFIX = _KEYS.shown
LIFE, PLAN, LEADER, ENDED, ID = (
    key.decode() for key in (_KEYS.life, _KEYS.plan, _KEYS.leader, _KEYS.ended, _KEYS.id)
)
SEALED = re.compile(rf"{PREFIX}/(?:[ml]/[^/]+|plan|status)")
NUMBERED = re.compile(rf"{PREFIX}/(?:[ml]/[^/]+|plan)")
NAME_OF_OLD = b"0123456789abcdef"
"""The name of an etcd that was set up long ago: the etcd lease that would show its age is gone."""

PUT, DELETE = 0, 1
"""Kinds of events, as etcd numbers them."""


# -- answers, with the fields of etcd's messages that the client reads -----------------------------


@dataclass(frozen=True)
class Pair:
    """etcd's KeyValue."""

    key: bytes
    value: bytes
    create_revision: int
    mod_revision: int
    version: int
    lease: int


@dataclass(frozen=True)
class Header:
    """etcd's ResponseHeader."""

    revision: int


@dataclass(frozen=True)
class Found:
    """etcd's RangeResponse."""

    header: Header
    kvs: tuple[Pair, ...] = ()


@dataclass(frozen=True)
class Part:
    """etcd's ResponseOp."""

    response_range: Found


@dataclass(frozen=True)
class Done:
    """etcd's TxnResponse."""

    succeeded: bool
    header: Header
    responses: tuple[Part, ...]


@dataclass(frozen=True)
class Granted:
    """The answers that concern an etcd lease."""

    header: Header
    ID: int
    TTL: int


@dataclass(frozen=True)
class Event:
    """etcd's Event."""

    type: int
    kv: Pair


@dataclass(frozen=True)
class Told:
    """etcd's WatchResponse."""

    events: tuple[Event, ...]
    canceled: bool = False


# -- the client's side of gRPC ---------------------------------------------------------------------


class Channel(EtcdConnection):
    """A gRPC channel: any number of calls at a time, each by itself."""

    store: KeyedEtcd

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self._pending: dict[Inbox, None] = {}
        self._streams: dict[Stream, None] = {}

    def ask(self, method: str, request: Any, timeout_s: float) -> Routine:
        """One call; a sub-routine of the calling task. Raises what gRPC does."""
        if self.closed:
            raise grpc.RpcError("the connection was lost")
        answer = Inbox(self.network.kernel)
        self._pending[answer] = None
        self._send(method, (request, self), answer)
        item = yield answer, timeout_s
        self._pending.pop(answer, None)
        if item is None:
            raise grpc.RpcError("context deadline exceeded")
        if item is BROKEN:
            raise grpc.RpcError("the connection was lost")
        if isinstance(item[0], Exception):
            raise item[0]
        return item[0]

    def follow(self, request: Any, timeout_s: float | None) -> Stream:
        """Begin a watch."""
        if self.closed:
            raise ValueError("the channel is closed")
        stream = Stream(self, request.create_request, timeout_s)
        self._streams[stream] = None
        self._carry(self.store.process.do, (self.store.watch, stream), is_answer=False)
        return stream

    def let_go_of(self, stream: Stream) -> None:
        """It has ended."""
        self._streams.pop(stream, None)

    def close(self) -> None:
        """End every call in progress."""
        if not self.closed:
            self.closed = True
            self._break(0.0)

    def reset(self) -> None:
        """The other end is gone: the client's kernel says so soon, if it can."""
        name = self.machine.name
        if self.store.machine.up and name not in self.network.cut:
            self._break(self.network.delay_s(name))
        self.closed = True

    def _break(self, after_s: float) -> None:
        for answer in self._pending:
            self.network.kernel.after(after_s, answer.put, BROKEN)
        for stream in [*self._streams]:
            self.network.kernel.after(after_s, stream.fail, "the connection was lost")


class Stream:
    """A watch, as its client iterates over it."""

    def __init__(self, channel: Channel, asked: Any, timeout_s: float | None) -> None:
        kernel = channel.network.kernel
        self.channel = channel
        self.key, self.end = asked.key.decode(), asked.range_end.decode()
        self.revision = asked.start_revision
        self.next_s = 0.0
        """Not before this the next event arrives: they keep their order."""
        self._kernel = kernel
        self._inbox = Inbox(kernel)
        self._ends_s = kernel.now + timeout_s if timeout_s is not None else None
        self.open = True

    def covers(self, key: str) -> bool:
        """Whether changes of this key are told."""
        return key == self.key or (self.key <= key < self.end)

    def tell(self, told: Told) -> None:
        """It has arrived."""
        if self.open:
            self._inbox.put(told)

    def fail(self, why: str) -> None:
        """It ends here."""
        if self.open:
            self.open = False
            self.channel.let_go_of(self)
            self._inbox.put(grpc.RpcError(why))

    def cancel(self) -> None:
        """The client wants no more."""
        self.fail("cancelled")

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Told:
        item = fibers.wait_for(self._next())
        if item is None:
            self.cancel()
            raise grpc.RpcError("context deadline exceeded")
        if isinstance(item, Exception):
            raise item
        assert isinstance(item, Told)
        return item

    def _next(self) -> Routine:
        wait_s = None if self._ends_s is None else max(0.0, self._ends_s - self._kernel.now)
        return (yield self._inbox, wait_s)


# -- the store -------------------------------------------------------------------------------------


@dataclass
class Grant:
    """An etcd lease, and what hangs on it."""

    ttl_s: int
    ends_s: float
    """By etcd's clock."""
    keys: dict[str, None] = field(default_factory=dict)


@dataclass(frozen=True)
class Epoch:
    """What was written by agents that are in this epoch (see ``transport/etcd/sealed.py``)."""

    checker: Checker
    written: dict[str, dict[bytes, int]] = field(default_factory=dict)
    """Key → what was written there, and when last (a count)."""
    sealed: re.Pattern[str] = SEALED
    numbered: re.Pattern[str] = NUMBERED


class KeyedEtcd(Etcd):
    """One life of such an etcd's data."""

    prefix = PREFIX

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        ttl_s = self.cluster.policy.lease_ttl_s
        self.leader_key_s = float(max(LEAST_LEADER_S, math.floor(ttl_s * LEADER_LEASES)))
        self.kept_s = float(math.ceil(max(LEAST_KEPT_S, KEPT_LEASES * ttl_s)))
        self.forgers = self.cluster.forgers
        self.pairs: dict[str, Pair] = {}
        self.grants: dict[int, Grant] = {}
        self.epochs: dict[RunLife | None, Epoch] = {}
        self._past: dict[str, list[tuple[int, Pair | None]]] = {}
        """Key → its values, each with the revision in which it got it."""
        self._log: list[tuple[int, tuple[Event, ...]]] = []
        self._streams: list[Stream] = []
        self._grants = self._writes = 0
        self._seal: Seal | None = None
        """Of the epoch."""
        self._plans_begin_anew = False
        """Another client has ended the life of the run's records."""
        if self.cluster.endpoint.lives == 1:
            self._change([(ID, NAME_OF_OLD, 0)])

    @property
    def data(self) -> dict[str, bytes]:
        """What every client can read."""
        return {key: pair.value for key, pair in self.pairs.items()}

    def epoch(self, life: RunLife | None) -> Epoch:
        """The truth about this epoch."""
        return self.epochs.setdefault(life, Epoch(self.checker))

    def connect(self, machine: Machine) -> Channel:
        return Channel(self.network, machine, self)

    def serve(self, method: str, args: tuple[Any, ...], answer: Answer) -> None:
        """Carry out one call."""
        if self.down or self.cluster.over:  # what comes after the run waits until all are started again
            return
        try:
            answered = getattr(self, method)(*args)
        except grpc.RpcError as error:
            answered = error
        answer(answered)

    @property
    def _header(self) -> Header:
        return Header(self.revision)

    # -- calls ----------------------------------------------------------------------------------

    def greet(self, request: None, channel: Channel) -> Header:
        """The first call over a channel."""
        return self._header

    def find(self, request: Any, channel: Channel | None = None) -> Found:
        """etcd's Range."""
        key, end = request.key.decode(), request.range_end.decode()
        if request.revision:
            past = [pair for at, pair in self._past.get(key, ()) if at <= request.revision]
            pair = past[-1] if past else None
            return Found(self._header, (pair,) if pair is not None else ())
        keys = sorted(one for one in self.pairs if key <= one < end) if end else [key]
        return Found(self._header, tuple(self.pairs[one] for one in keys if one in self.pairs))

    def transact(self, request: Any, channel: Channel) -> Done:
        """etcd's Txn."""
        succeeded = all(self._holds(one) for one in request.compare)
        changes: list[tuple[str, bytes | None, int]] = []
        found: list[Found] = []
        for one in request.success if succeeded else request.failure:
            kind = one.WhichOneof("request")
            found.append(self.find(one.request_range) if kind == "request_range" else Found(self._header))
            if kind == "request_put":
                asked = one.request_put
                if asked.lease and asked.lease not in self.grants:
                    raise grpc.RpcError("etcdserver: requested lease not found")
                changes.append((asked.key.decode(), asked.value, asked.lease))
            elif kind == "request_delete_range":
                asked = one.request_delete_range
                doomed = self.find(rpc.RangeRequest(key=asked.key, range_end=asked.range_end))
                changes += [(pair.key.decode(), None, 0) for pair in doomed.kvs]
        if changes:
            known = self.pairs.keys() & {LEADER}
            self._change(changes)
            self._written(changes, channel, was_led=bool(known))
        return Done(succeeded, self._header, tuple(Part(one) for one in found))

    def _holds(self, compare: Any) -> bool:
        pair = self.pairs.get(compare.key.decode())
        kind = rpc.Compare
        if compare.target == kind.VALUE:
            there: Any = pair.value if pair is not None else None
            wanted: Any = compare.value
        else:
            name, wanted = {
                kind.VERSION: ("version", compare.version),
                kind.CREATE: ("create_revision", compare.create_revision),
                kind.MOD: ("mod_revision", compare.mod_revision),
            }[compare.target]
            there = getattr(pair, name) if pair is not None else 0
        if compare.result == kind.GREATER:
            return bool(there > wanted)
        assert compare.result == kind.EQUAL  # all that the client asks for
        return bool(there == wanted)

    def grant(self, request: Any, channel: Channel) -> Granted:
        """etcd's LeaseGrant."""
        self._grants += 1
        self.grants[self._grants] = Grant(request.TTL, self.now_s + request.TTL)
        return Granted(self._header, self._grants, request.TTL)

    def keep_alive(self, request: Any, channel: Channel) -> Granted:
        """etcd's LeaseKeepAlive, once."""
        grant = self.grants.get(request.ID)
        if grant is None:
            return Granted(self._header, request.ID, 0)
        grant.ends_s = self.now_s + grant.ttl_s
        return Granted(self._header, request.ID, grant.ttl_s)

    def time_to_live(self, request: Any, channel: Channel) -> Granted:
        """etcd's LeaseTimeToLive."""
        grant = self.grants.get(request.ID)
        left_s = int(grant.ends_s - self.now_s) if grant is not None else -1
        return Granted(self._header, request.ID, left_s)

    def revoke_grant(self, request: Any, channel: Channel | None) -> Granted:
        """etcd's LeaseRevoke."""
        if request.ID not in self.grants:
            raise grpc.RpcError("etcdserver: requested lease not found")
        self.end_grant(request.ID)
        return Granted(self._header, request.ID, 0)

    def end_grant(self, lease_id: int) -> None:
        """What hangs on it goes with it."""
        gone = self.grants.pop(lease_id)
        if gone.keys:
            self.cluster.story("etcd", "{} go by themselves", ", ".join(gone.keys))
            self._change([(key, None, 0) for key in gone.keys])

    def _let_go(self) -> None:
        for lease_id in [one for one, grant in self.grants.items() if self.now_s >= grant.ends_s]:
            self.end_grant(lease_id)

    # -- changes and watches --------------------------------------------------------------------

    def _change(self, changes: list[tuple[str, bytes | None, int]]) -> None:
        """Write or remove these keys, in one revision."""
        self.revision += 1
        events: dict[str, Event] = {}
        for key, value, lease in changes:
            before = self.pairs.pop(key, None)
            if before is not None and before.lease in self.grants:
                self.grants[before.lease].keys.pop(key, None)
            if value is None:
                pair, after = Pair(key.encode(), b"", 0, self.revision, 0, 0), None
            else:
                born, version = (before.create_revision, before.version) if before else (self.revision, 0)
                pair = after = Pair(key.encode(), value, born, self.revision, version + 1, lease)
                self.pairs[key] = pair
                if lease:
                    self.grants[lease].keys[key] = None
            self._past.setdefault(key, []).append((self.revision, after))
            events[key] = Event(PUT if after is not None else DELETE, pair)
        self._log.append((self.revision, tuple(events.values())))
        self._streams = [one for one in self._streams if one.open and not one.channel.closed]
        for stream in self._streams:
            self._tell(stream, tuple(events.values()), loss=max(self.hint_loss, self.network.loss))
        for key in events:
            if key == LIFE and key in self.pairs:
                self._begin_epoch(self.pairs[key])
            self._took(key)

    def watch(self, stream: Stream) -> None:
        """etcd's Watch: from the revision that the client asks for, or from now on."""
        if self.down or self.cluster.over or not stream.open:
            return
        if stream.revision:
            for revision, events in self._log:
                if revision >= stream.revision:
                    self._tell(stream, events, loss=self.network.loss)
        self._streams.append(stream)

    def _tell(self, stream: Stream, events: tuple[Event, ...], *, loss: float) -> None:
        """What is lost here is as if it came too late: the next reading closes the gap, as where a stream breaks."""
        covered = tuple(one for one in events if stream.covers(one.kv.key.decode()))
        kernel, network, name = self.process.kernel, self.network, stream.channel.machine.name
        if not covered or kernel.random.random() < loss:
            return
        if name in network.cut | network.deaf:
            network.held.setdefault(name, []).append((stream.tell, (Told(covered),)))
            return
        stream.next_s = max(stream.next_s, kernel.now + network.delay_s(name, "answers"))
        kernel.after(stream.next_s - kernel.now, stream.tell, Told(covered))

    # -- what is true ---------------------------------------------------------------------------

    def _written(
        self, changes: list[tuple[str, bytes | None, int]], channel: Channel, *, was_led: bool
    ) -> None:
        """An agent of the run has done this."""
        for key, value, _ in changes:
            if value is not None:
                self._put_by_agent(key, value)
        if any(key == LEADER and value is not None for key, value, _ in changes) and not was_led:
            self._elected(channel.machine)

    def _put_by_agent(self, key: str, value: bytes) -> None:
        record = value[HEAD_BYTES:] if value.startswith(MAGIC) else value
        self._writes += 1
        for epoch in self.epochs.values():
            if record in epoch.written.get(key, ()):
                epoch.written[key][record] = self._writes
        if self.forgers is not None:
            self.forgers.record(self, key, value)
        kind, _, name = key.removeprefix(f"{PREFIX}/").partition("/")
        if kind == "l" and name in self.leases:
            lease = decode(Lease, self.leases[name])
            if lease.revoked:
                self.checker.revoked(self, lease)
            else:
                self.checker.renewed(name)
        elif key == PLAN and record != self.plan:
            self._published(decode(Plan, record))
        elif key == ENDED:
            self._removed(record)

    def _published(self, plan: Plan) -> None:
        begins = self._plans_begin_anew and plan.version == 1
        before = decode(Plan, self.plan) if self.plan is not None and not begins else None
        self._plans_begin_anew = False
        self.plan, self.version = encode(plan), plan.version
        self.checker.published(self, before, plan)

    def _removed(self, ended: bytes) -> None:
        """The coordinator has left nothing of the run behind but how it ended."""
        self.ended, self._seal = ended, None
        self._plans_begin_anew = False
        self.remove_all()
        self.cluster.over = True

    def _elected(self, machine: Machine) -> None:
        newest, kept = self.checker.newest_history, machine.disk
        self.cluster.story("etcd", "an agent on {} is elected", machine.name)
        has_plan = PLAN in self.pairs and not self._plans_begin_anew
        if not has_plan and newest is not None and not self._forgotten and self.ended is None:
            is_newer = kept is not None and kept.rank > newest.rank
            machine.disk = kept if is_newer else newest  # an assumption, see the package's docstring

    def _begin_epoch(self, life: Pair) -> None:
        """Nothing of before counts in it."""
        name = SECRET.seal().open(LIFE, life.value)
        if isinstance(name, Unverified):
            return
        self._seal = SECRET.seal(b"%d/%s" % (life.mod_revision, life.value))
        self._plans_begin_anew = self.plan is not None
        for key in self.pairs:
            self._took(key)

    def _took(self, key: str) -> None:
        """Have ``members`` and ``leases`` hold what of it counts."""
        kind, _, name = key.removeprefix(f"{PREFIX}/").partition("/")
        if not name or kind not in ("m", "l") or not key.startswith(PREFIX):
            return
        record = self._counts(key)
        if kind == "l" and record is not None and not isinstance(readable(Lease, record), Lease):
            record = None
        kept = self.members if kind == "m" else self.leases
        if record is None:
            kept.pop(name, None)
        else:
            kept[name] = record

    def _counts(self, key: str) -> bytes | None:
        """The record under this key if it verifies, and an incarnation's is not forgotten."""
        pair = self.pairs.get(key)
        if pair is None or self._seal is None:
            return None
        record = self._seal.open(key, pair.value)
        return None if isinstance(record, Unverified) or record == GONE else record

    def vacate(self, why: str) -> None:
        """The leader key goes."""
        if LEADER in self.pairs:
            self.cluster.story("etcd", "the leader key {}", why)
            self._change([(LEADER, None, 0)])

    # -- what other clients do ------------------------------------------------------------------

    def scribble(self, name: str, member: bytes, lease: bytes) -> None:
        self.tamper(f"{PREFIX}/m/{name}", member)
        self.tamper(f"{PREFIX}/l/{name}", lease)

    def tamper(self, key: str, value: bytes | None) -> None:
        """Write this, or delete the key."""
        if value is None and key not in self.pairs:
            return
        self._tampered((key,))
        if value is not None and "/l/" in key and self._verifies(key, value):
            self.revived.add(key.rpartition("/")[2])
        self._plans_begin_anew |= key == LIFE
        self._change([(key, value, 0)])

    def expire(self, lease_id: int) -> None:
        """Revoke an etcd lease; who may write the keys that hang on it may do that."""
        keys = tuple(self.grants[lease_id].keys)
        self._tampered(keys)
        self.end_grant(lease_id)

    def _tampered(self, keys: Collection[str]) -> None:
        for key in keys:
            if NUMBERED.fullmatch(key) and key != PLAN:
                self.tampered.add(key.rpartition("/")[2])
            elif key in (LIFE, ID):  # for which every node has to register again
                self.tampered.update((*self.members, *self.leases))

    def _verifies(self, key: str, value: bytes) -> bool:
        return self._seal is not None and not isinstance(self._seal.open(key, value), Unverified)

    def enlist(self, name: str) -> None:
        """There is no roster: who has records counts."""

    def notify(self, name: str) -> None:
        """The coordinator watches the records."""

    def names(self) -> list[str]:
        """Incarnations that have a record."""
        start = f"{PREFIX}/l/"
        return [key.removeprefix(start) for key in self.pairs if key.startswith(start)]
