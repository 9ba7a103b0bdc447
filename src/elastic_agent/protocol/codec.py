"""Records as JSON, and which bytes are accepted as a record.

Nothing is ever unpickled or executed: bytes from the network go through :func:`decode`, which checks types,
ranges and sizes and raises :class:`RecordError` with the place of the first offence. A record that fails is
reported and ignored; it is never fatal to others.
"""

from __future__ import annotations

from typing import Any, TypeVar

import msgspec

from elastic_agent.printable import on_one_line, without_surrogates

from .records import RECORD_VERSION, Lease, Member, Phase, Plan, Waiting, World

MAX_RECORD_BYTES = 256 * 1024
"""Largest member or lease record accepted, in bytes."""

MAX_PLAN_BYTES = 4 * 1024 * 1024
"""Largest plan or world record accepted, in bytes (a world of 4,096 nodes takes about 600 KiB)."""

MAX_REPORTED_GENERATION = 2**40
"""The highest generation that a node is believed to have known (a new one each second reaches it in 35,000 years): the
coordinator goes above it, and what it publishes then must be in bounds too."""


class RecordError(ValueError):
    """A record that is malformed, oversized or of a foreign version; the message names the place."""


class ForeignVersionError(RecordError):
    """A record that another version of elastic-agent wrote, in a format that this one does not support."""


class _Header(msgspec.Struct):
    """The fields with which the records of all versions begin."""

    version: int | None = None
    """Of a member record."""
    format: int | None = None
    """Of a plan."""
    node_id: str = ""
    address: str = ""


R = TypeVar("R", Member, Lease, Plan, World)

MAX_REASON_CHARS, MAX_WAITING_CHARS = 1000, 2048
"""Of the reason in a :class:`Waiting`, and of the whole as a store keeps it."""

_encoder = msgspec.json.Encoder()
_LIMITS: dict[type, int] = {
    Member: MAX_RECORD_BYTES,
    Lease: MAX_RECORD_BYTES,
    Plan: MAX_PLAN_BYTES,
    World: MAX_PLAN_BYTES,
}
_DECODERS: dict[type, msgspec.json.Decoder[Any]] = {kind: msgspec.json.Decoder(kind) for kind in _LIMITS}
"""Made now, by the one thread that imports: msgspec 0.22 crashes when two threads decode a type for the first time at
once, each learning what the type looks like."""
_HEADER = msgspec.json.Decoder(_Header)
_WAITING = msgspec.json.Decoder(Waiting)
_UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError, RecursionError)


def encode(record: Member | Lease | Plan | World) -> bytes:
    """Return the record as JSON. Text that no UTF-8 can hold, such as an odd file name in an error, is replaced."""
    try:
        return _encoder.encode(record)
    except UnicodeEncodeError:
        return _encoder.encode(_encodable(msgspec.to_builtins(record)))


def _encodable(value: Any) -> Any:
    match value:
        case str():
            return without_surrogates(value)
        case dict():
            return {_encodable(key): _encodable(item) for key, item in value.items()}
        case list() | tuple():
            return [_encodable(item) for item in value]
        case _:
            return value


def decode(kind: type[R], data: bytes) -> R:
    """Return the record in ``data``.

    Raises:
        RecordError: the bytes are no such record; the message names what and where.
    """
    limit = _LIMITS[kind]
    if len(data) > limit:
        raise RecordError(
            f"{kind.__name__.lower()} record of {len(data)} bytes; at most {limit} are accepted"
        )
    _check_version(kind, data)
    try:
        record: R = _DECODERS[kind].decode(data)
    except _UNREADABLE as error:
        raise RecordError(f"not a {kind.__name__.lower()} record: {error}") from None
    _check(record)
    return record


def _check_version(kind: object, data: bytes) -> None:
    """Check the version of a record, which may be all that can be read of it.

    Raises:
        ForeignVersionError: it is not this agent's.
    """
    if kind is not Plan and kind is not Member:
        return
    try:
        header = _HEADER.decode(data)
    except _UNREADABLE:
        return
    found = header.format if kind is Plan else header.version
    if found in (None, RECORD_VERSION):
        return
    foreign = (
        f"another version of elastic-agent (records of version {found}; this agent supports {RECORD_VERSION})"
    )
    remedy = "; install the same version on all machines"
    if kind is Plan:
        raise ForeignVersionError(f"the run is coordinated by {foreign}{remedy}")
    where = f"node {header.node_id[:128]} at {header.address[:255]}"
    raise ForeignVersionError(f"{where} runs {foreign} and cannot take part{remedy}")


def check_whole(plan: Plan) -> None:
    """Check a plan that was put together from what the store has of it.

    Raises:
        RecordError: its generation runs, but it has no world; or its world is of a later generation.
    """
    if plan.phase is Phase.RUNNING and plan.sealed != plan.generation:
        raise RecordError(f"plan in which generation {plan.generation} runs without a world")
    _check_world_of(plan)


def check_readable(plan: Plan) -> None:
    """Check a plan that is about to be published as its readers will.

    Raises:
        RecordError: they would reject it; the message names what and where.
    """
    check_whole(decode(Plan, encode(plan)))


def _check(record: object) -> None:
    """Check what types cannot express."""
    policy = record.policy if isinstance(record, (Member, Plan)) else None
    if policy is not None and policy.min_nodes > policy.max_nodes:
        raise RecordError(f"policy with min_nodes {policy.min_nodes} > max_nodes {policy.max_nodes}")
    if policy is not None and not policy.fit(policy.max_nodes):
        raise RecordError(
            f"policy of {policy.min_nodes} to {policy.max_nodes} nodes that allows none of these counts"
        )
    plan = record.history if isinstance(record, Member) else record
    if isinstance(plan, Plan) and plan.budget.forgiven > plan.charged:
        raise RecordError(f"{plan.budget.forgiven} failures forgiven, but only {plan.charged} charged")
    world = plan.world if isinstance(plan, Plan) else plan
    if isinstance(world, World):
        _check_world(world)
    if isinstance(plan, Plan):
        _check_world_of(plan)


def _check_world_of(plan: Plan) -> None:
    if plan.sealed > plan.generation:
        raise RecordError(f"plan of generation {plan.generation} with the world of a later one")


def _check_world(world: World) -> None:
    rank = 0
    seated: set[str] = set()
    for seat in world.seats:
        if seat.node_id in seated:
            raise RecordError(f"world {world.generation}: {seat.node_id} has two seats")
        if seat.first_rank != rank:
            raise RecordError(
                f"world {world.generation}: the first rank of {seat.node_id} is {seat.first_rank}, "
                f"expected {rank}"
            )
        seated.add(seat.node_id)
        rank += seat.slots
    if not seated:
        raise RecordError(f"world {world.generation}: no seats")


def waiting_text(waiting: Waiting) -> str:
    """Return it as JSON, on one line; without the nodes that have joined where they are too many."""
    reason = without_surrogates(on_one_line(waiting.reason[:MAX_REASON_CHARS]))
    waiting = msgspec.structs.replace(waiting, reason=reason)
    text = _encoder.encode(waiting).decode()
    if len(text) > MAX_WAITING_CHARS:
        text = _encoder.encode(msgspec.structs.replace(waiting, joined=())).decode()
    return text


def waiting_in(text: str) -> Waiting:
    """Return what :func:`waiting_text` made this of; any other text is the reason itself."""
    try:
        waiting = _WAITING.decode(text)
    except _UNREADABLE:
        waiting = Waiting(text)
    return msgspec.structs.replace(waiting, reason=on_one_line(waiting.reason))
