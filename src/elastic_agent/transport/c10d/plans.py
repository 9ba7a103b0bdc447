"""Plans in a store: one key for each version, whose first writer wins; what is large lies apart, by its content.

A plan is read by every node, so it is kept small: its world and its order of nodes, which seldom change, are
stored under their digests, and a connection that has seen them does not read them again. A forming plan mostly
awaits exactly the seats of the world it carries; then they are not written twice.

Old plans are overwritten with a mark rather than deleted: such a version cannot be published again, and nodes that
wait for one wake up. The marks are removed later.
"""

from __future__ import annotations

import hashlib
from collections import deque
from collections.abc import Callable
from functools import lru_cache
from typing import TypeVar

import msgspec
from msgspec import Struct

from elastic_agent.protocol import (
    MAX_PLAN_BYTES,
    ForeignVersionError,
    Name,
    Plan,
    RecordError,
    World,
    check_follows,
    check_whole,
    decode,
    encode,
)

from .store import StoreClient

T = TypeVar("T")

KEPT_PLANS = 16
KEPT_MARKS = 1000
"""How many marks of removed plans are kept: nodes that fall behind further begin at the newest plan."""
INLINE_NAMES = 16
"""An order of at most so many nodes stays in the plan."""

_CACHED = 4
_CLEARED = b"-"
"""The value of a version whose plan was removed."""
_Order = tuple[Name, ...]


class _Envelope(Struct, omit_defaults=True, forbid_unknown_fields=True, frozen=True):
    """What is stored under a version: the plan, and where its parts are."""

    plan: msgspec.Raw
    world: str | None = None
    order: str | None = None
    awaits_world: bool = False


_ENVELOPES = msgspec.json.Decoder(_Envelope)
_ORDERS = msgspec.json.Decoder(_Order)
# (Made once, at import, for the reason given in protocol/codec.py.)


class _DamagedError(Exception):
    """The value of a version is not a plan; the text is the reason."""


class PlanReader:
    """Reads the plans of one run over one connection."""

    def __init__(self, client: StoreClient, prefix: str, report_invalid: Callable[[str], None]) -> None:
        """``report_invalid`` is called once with everything in the store that is not a plan."""
        self._client = client
        self._prefix = prefix
        self._report_invalid = report_invalid
        self._reported: set[str] = set()
        self._worlds: dict[str, World] = {}
        self._orders: dict[str, _Order] = {}
        self._best: Plan | None = None
        self.foreign = ""
        """Another version of elastic-agent coordinates the run, in words; empty: none does, as far as is known."""
        self.end = 0
        """The last version that something stands under, as of the last reading."""

    def key(self, version: int) -> str:
        """Where a version is kept."""
        return f"{self._prefix}/plan/{version}"

    def newest(self) -> Plan | None:
        """The newest plan, or None; anything that is not a plan is reported and skipped."""
        version, data = self._start()
        while data is not None:
            self._take(version, data)
            version += 1  # the pointer is written after the plan: look past it
            data = self._client.peek(self.key(version))
        self.end = version - 1
        return self._best

    def _start(self) -> tuple[int, bytes | None]:
        """Where to begin: at the version the pointer names, or else after the newest one known."""
        known = self._best.version if self._best is not None else 0
        before = 0
        while (announced := self._announced()) > max(known, before):
            data = self._client.peek(self.key(announced))
            if data is not None and data != _CLEARED:
                return announced, data
            before = announced  # removed in between: there is a newer one
        return known + 1, self._client.peek(self.key(known + 1))

    def _announced(self) -> int:
        data = self._client.peek(f"{self._prefix}/latest")
        if data is None:
            return 0
        text = data[:32].decode("ascii", "replace")
        if not text.isdecimal() or len(text) > 16:
            self._report(f"{self._prefix}/latest: {text!r} is not a plan version")
            return 0
        return int(text)

    def _take(self, version: int, data: bytes) -> None:
        if data == _CLEARED:
            return
        try:
            plan = self._open(data, version)
            check_follows(plan, self._best)
        except (_DamagedError, RecordError) as error:
            self.foreign = str(error) if isinstance(error, ForeignVersionError) else ""
            self._report(f"{self.key(version)}: {error}")
        else:
            self._best, self.foreign = plan, ""

    def published(self, plan: Plan) -> None:
        """This plan was just written, over this connection."""
        self._best = plan

    def _open(self, data: bytes, version: int) -> Plan:
        """The plan in these bytes, its parts put back in.

        Raises:
            ForeignVersionError: another version of elastic-agent wrote it.
        """
        if len(data) > MAX_PLAN_BYTES:
            raise _DamagedError(f"{len(data)} bytes; at most {MAX_PLAN_BYTES} are accepted")
        try:
            envelope = _ENVELOPES.decode(data)
            plan = decode(Plan, bytes(envelope.plan))
        except ForeignVersionError:
            raise
        except (msgspec.DecodeError, RecordError, UnicodeDecodeError, RecursionError) as error:
            raise _DamagedError(str(error)) from None
        if plan.version != version:
            raise _DamagedError(f"its version field is {plan.version}")
        changes: dict[str, object] = {}
        if envelope.world is not None:
            world = self._part(envelope.world, self._worlds, _decode_world)
            changes["world"] = world
            if envelope.awaits_world:
                changes["uncleared"] = world.seats
        if envelope.order is not None:
            changes["order"] = self._part(envelope.order, self._orders, _decode_order)
        return _whole(msgspec.structs.replace(plan, **changes) if changes else plan)

    def _part(self, digest: str, cache: dict[str, T], parse: Callable[[bytes], T]) -> T:
        part = cache.get(digest)
        if part is None:
            body = self._client.peek(f"{self._prefix}/part/{digest}") if digest.isalnum() else None
            if body is None or _digest(body) != digest:
                raise _DamagedError("a part is missing or damaged")
            try:
                part = parse(body)
            except (RecordError, msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
                raise _DamagedError(f"a part is not readable: {error}") from None
            while len(cache) >= _CACHED:
                del cache[next(iter(cache))]
            cache[digest] = part
        return part

    def _report(self, problem: str) -> None:
        """Report it, once."""
        if problem not in self._reported and len(self._reported) < 1000:
            self._reported.add(problem)
            self._report_invalid(problem)


class PlanWriter:
    """Publishes plans of one run, and clears old ones away."""

    def __init__(self, client: StoreClient, prefix: str, reader: PlanReader) -> None:
        self._client = client
        self._prefix = prefix
        self._reader = reader
        self._parts: deque[tuple[int, frozenset[str]]] = deque()
        """Which parts the kept versions need."""

    def publish(self, plan: Plan) -> bool:
        """Write the version if it follows the newest and no other coordinator has written it."""
        newest = self._reader.newest()
        if plan.version != (newest.version if newest is not None else 0) + 1:
            return False
        envelope, parts = _pack(plan)
        for digest, body in parts.items():
            self._client.put(f"{self._prefix}/part/{digest}", body)
        key = self._reader.key(plan.version)
        data = msgspec.json.encode(envelope)
        if self._client.exchange(key, b"", data) != data:
            return False
        self._client.put(f"{self._prefix}/latest", str(plan.version).encode())
        self._reader.published(plan)
        self._clear_away(plan.version, frozenset(parts))
        return True

    def _keys_up_to(self, version: int) -> list[str]:
        first = max(1, version - KEPT_PLANS - KEPT_MARKS)
        return [self._reader.key(one) for one in range(first, version + 1)]

    def _clear_away(self, version: int, parts: frozenset[str]) -> None:
        self._parts.append((version, parts))
        gone: set[str] = set()
        while self._parts[0][0] <= version - KEPT_PLANS:
            gone |= self._parts.popleft()[1]
        kept = frozenset[str]().union(*(needed for _, needed in self._parts))
        self._client.delete([f"{self._prefix}/part/{digest}" for digest in gone - kept])
        if version > KEPT_PLANS:
            self._client.put(self._reader.key(version - KEPT_PLANS), _CLEARED)
        if version > KEPT_PLANS + KEPT_MARKS:
            self._client.delete([self._reader.key(version - KEPT_PLANS - KEPT_MARKS)])

    def remove_all(self) -> None:
        """Remove every plan: the run is over, and no node reads them any more."""
        self._reader.newest()
        keys = self._keys_up_to(self._reader.end)
        kept = self._client.peek_many(keys[-KEPT_PLANS:])
        parts = {digest for data in kept.values() for digest in _parts_of(data)}
        parts = parts.union(*(needed for _, needed in self._parts))
        self._client.delete(
            [f"{self._prefix}/latest", *keys, *(f"{self._prefix}/part/{digest}" for digest in parts)]
        )


def _whole(plan: Plan) -> Plan:
    try:
        check_whole(plan)
    except RecordError as error:
        raise _DamagedError(str(error)) from None
    return plan


def _parts_of(data: bytes) -> list[str]:
    try:
        envelope = _ENVELOPES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return []
    return [part for part in (envelope.world, envelope.order) if part is not None]


def _pack(plan: Plan) -> tuple[_Envelope, dict[str, bytes]]:
    parts: dict[str, bytes] = {}
    slim: dict[str, object] = {}
    world = order = None
    awaits_world = plan.world is not None and plan.uncleared == plan.world.seats
    if plan.world is not None:
        body = encode(plan.world)
        world = _digest(body)
        parts[world] = body
        slim["world"] = None
        if awaits_world:
            slim["uncleared"] = ()
    if len(plan.order) > INLINE_NAMES:
        body = msgspec.json.encode(plan.order)
        order = _digest(body)
        parts[order] = body
        slim["order"] = ()
    small = encode(msgspec.structs.replace(plan, **slim))
    return _Envelope(msgspec.Raw(small), world, order, awaits_world), parts


@lru_cache(maxsize=_CACHED)
def _decode_world(body: bytes) -> World:
    """Read once for all connections of the process, which share it: a thousand nodes take 3 ms."""
    return decode(World, body)


def _decode_order(body: bytes) -> _Order:
    return _ORDERS.decode(body)


def _digest(body: bytes) -> str:
    return hashlib.sha256(body).hexdigest()[:32]
