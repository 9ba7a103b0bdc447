"""Plans in a store: one key for each version, whose first writer wins; what is large lies apart, by its content.

A plan is read by every node, so it is kept small: its world and its order of nodes, which seldom change, are
stored under their digests, and a connection that has seen them does not read them again. A forming plan mostly
awaits exactly the seats of the world it carries; then they are not written twice.
"""

from __future__ import annotations

import hashlib
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
    check_whole,
    decode,
    encode,
)

from .base import StoreLostError
from .keys import LifeKeys
from .record_reader import ReportInvalid, once
from .table import Table

T = TypeVar("T")

KEPT_PLANS = 16
"""So many plans are kept: nodes that fall behind further begin at the newest one."""
INLINE_NAMES = 16
"""An order of at most so many nodes stays in the plan."""

_CACHED = 4
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

    def __init__(self, table: Table, keys: LifeKeys, report_invalid: ReportInvalid) -> None:
        """``report_invalid`` is called once with everything in the store that is not a plan."""
        self._table = table
        self._keys = keys
        self._report_invalid = once(report_invalid)
        self._worlds: dict[str, World] = {}
        self._orders: dict[str, _Order] = {}
        self.best: Plan | None = None
        """The newest plan, as of the last reading or writing."""
        self._just_read: dict[int, bytes | None] = {}
        """What stands under some versions, as of the last reading of the table."""
        self.foreign = ""
        """Another version of elastic-agent coordinates the run, in words; empty: none does, as far as is known."""
        self.end = 0
        """The last version that something stands under, as of the last reading."""

    async def newest(self) -> Plan | None:
        """Return the newest plan, or None; anything that is not a plan is reported and skipped."""
        version = await self._start()
        while (data := await self._at(version)) is not None:
            await self._take(version, data)
            version += 1  # the pointer is written after the plan: look past it
        self.end = version - 1
        return self.best

    async def _at(self, version: int) -> bytes | None:
        """Return what stands under a version, as of the last reading of the table."""
        if version not in self._just_read:
            await self._read_versions(version)
        return self._just_read[version]

    async def _read_versions(self, *versions: int) -> int:
        """Read these versions; return which one the pointer names."""
        keys = {version: self._keys.plan(version) for version in versions}
        found = await self._table.read([self._keys.latest, *keys.values()])
        self._just_read = {version: found.get(key) for version, key in keys.items()}
        return self._announced(found.get(self._keys.latest))

    async def _start(self) -> int:
        """Return where to begin: at the version the pointer names, or else after the newest one known."""
        following = (self.best.version if self.best is not None else 0) + 1
        announced, before = await self._read_versions(following, following + 1), 0
        while announced > max(following + 1, before):
            before, announced = announced, await self._read_versions(announced)
            if self._just_read[before] is not None:
                return before
        if before:  # it was removed in between, or the pointer is wrong
            await self._read_versions(following, following + 1)
        return following

    def _announced(self, data: bytes | None) -> int:
        if data is None:
            return 0
        text = data[:32].decode("ascii", "replace")
        if not text.isdecimal() or len(text) > 16:
            self._report(f"{self._keys.latest}: {text!r} is not a plan version")
            return 0
        return int(text)

    async def _take(self, version: int, data: bytes) -> None:
        try:
            plan = await self._open(data, version)
        except (_DamagedError, RecordError) as error:
            self.foreign = str(error) if isinstance(error, ForeignVersionError) else ""
            self._report(f"{self._keys.plan(version)}: {error}")
        else:
            self.best, self.foreign = plan, ""

    def published(self, plan: Plan) -> None:
        """Take note of a plan that was just written, over this connection."""
        self.best = plan

    async def _open(self, data: bytes, version: int) -> Plan:
        """Return the plan in these bytes, its parts put back in.

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
            world: World = await self._part(envelope.world, self._worlds, _decode_world)
            changes["world"] = world
            if envelope.awaits_world:
                changes["uncleared"] = world.seats
        if envelope.order is not None:
            order: _Order = await self._part(envelope.order, self._orders, _decode_order)
            changes["order"] = order
        return _whole(msgspec.structs.replace(plan, **changes) if changes else plan)

    async def _part(self, digest: str, cache: dict[str, T], parse: Callable[[bytes], T]) -> T:
        part = cache.get(digest)
        if part is None:
            key = self._keys.parts + digest
            self._just_read.clear()  # a version that is written meanwhile would be missed by who waits for it
            body = (await self._table.read([key])).get(key) if digest.isalnum() else None
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
        self._report_invalid(self._table.root + problem)


class PlanWriter:
    """Publishes plans of one run, and clears old ones away."""

    def __init__(self, table: Table, keys: LifeKeys, reader: PlanReader) -> None:
        self._table = table
        self._keys = keys
        self._reader = reader
        self._kept: dict[int, frozenset[str]] | None = None
        """Version of each plan that is kept → the parts it needs; None before it was read."""

    async def publish(self, plan: Plan) -> None:
        """Write the version that follows the newest one.

        Raises:
            StoreLostError: also if something stands there already: what is in the store has to be read again.
        """
        if self._kept is None:
            stored = await self._table.read_folders(self._keys.plans)
            self._kept = {
                version: _parts_of(stored[key]) for key in stored if (version := self._version(key))
            }
        envelope, parts = _pack(plan)
        for digest in parts.keys() - frozenset[str]().union(*self._kept.values()):
            await self._table.put(self._keys.parts + digest, parts[digest])
        data = msgspec.json.encode(envelope)
        key = self._keys.plan(plan.version)
        newest = self._reader.best or await self._reader.newest()
        follows = plan.version == (newest.version if newest is not None else 0) + 1
        if not follows or await self._table.swap(key, None, data) != data:
            raise StoreLostError(f"another coordinator has written {self._table.root}{key}")
        await self._table.put(self._keys.latest, str(plan.version).encode())
        self._reader.published(plan)
        self._kept[plan.version] = frozenset(parts)
        await self._clear_away(plan.version - KEPT_PLANS)

    def _version(self, key: str) -> int:
        version = key.removeprefix(self._keys.plans)
        return int(version) if version.isdecimal() and len(version) <= 16 else 0

    async def _clear_away(self, last: int) -> None:
        """Remove the plans up to this version, and the parts that only they need."""
        assert self._kept is not None  # read with the first plan
        old = {version: self._kept.pop(version) for version in [*self._kept] if version <= last}
        parts = frozenset[str]().union(*old.values()) - frozenset[str]().union(*self._kept.values())
        await self._table.delete(
            [*map(self._keys.plan, old), *(self._keys.parts + digest for digest in parts)]
        )


class UnknownPlanError(StoreLostError):
    """The run has a plan that cannot be read, so the next one cannot be determined."""

    def __init__(self, folder: str) -> None:
        super().__init__(
            f"what {folder} in the store holds is not a plan; expected the newest plan; restore it from a backup, or "
            "stop every agent of the run, remove its keys and start it again"
        )


def _whole(plan: Plan) -> Plan:
    try:
        check_whole(plan)
    except RecordError as error:
        raise _DamagedError(str(error)) from None
    return plan


def _parts_of(data: bytes) -> frozenset[str]:
    try:
        envelope = _ENVELOPES.decode(data)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError):
        return frozenset()
    return frozenset(part for part in (envelope.world, envelope.order) if part is not None)


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
