"""What comes from the network is either a record or a RecordError that says what is wrong with it, and where."""

from __future__ import annotations

import hashlib
import json
from typing import Any

import msgspec
import pytest

from elastic_agent.protocol.codec import MAX_PLAN_BYTES, MAX_RECORD_BYTES, RecordError, decode, encode
from elastic_agent.protocol.records import (
    RECORD_VERSION,
    Address,
    Failure,
    FailureKind,
    Lease,
    Member,
    Phase,
    Plan,
    Policy,
    Refusal,
    Seat,
    World,
)
from tests.fuzz.samples import record_samples
from tests.protocol.support import member, on_disk, plan, world

KINDS = (Member, Lease, Plan, World)


@pytest.mark.parametrize(
    ("kind", "data"), [(kind, data) for kind in KINDS for data in record_samples()[kind]]
)
def test_records_survive_decoding_and_encoding(kind: Any, data: bytes) -> None:
    assert encode(decode(kind, data)) == data


def test_only_characters_outside_utf_8_are_replaced_in_text() -> None:
    failure = Failure(FailureKind.WORKER, "cannot read caf\udce9.jpg", tail="x" * 4095 + "\udce9")
    wanted = Failure(FailureKind.WORKER, "cannot read caf?.jpg", tail="x" * 4095 + "?")
    for record, failed in (
        (member("a"), {"failure": failure}),
        (plan(Phase.FORMING, 2, 3), {"failure": failure, "reason": "\ud800"}),
    ):
        found: Any = decode(type(record), encode(msgspec.structs.replace(record, **failed)))
        assert found.failure == wanted
        plain = {name: getattr(record, name) for name in failed}
        assert msgspec.structs.replace(found, **plain) == record


@pytest.mark.parametrize("data", [b"[" * 200_000, b'{"a":' * 20_000, b'"\xff"', b'"\\ud800"', b"9" * 5000])
@pytest.mark.parametrize("kind", KINDS)
def test_bytes_made_to_break_a_parser_are_a_record_error(kind: Any, data: bytes) -> None:
    with pytest.raises(RecordError):
        decode(kind, data)


@pytest.mark.parametrize(("kind", "limit"), [(Member, MAX_RECORD_BYTES), (Plan, MAX_PLAN_BYTES)])
def test_an_oversized_record_is_refused_with_its_size_and_the_limit(kind: Any, limit: int) -> None:
    good = encode(member("a") if kind is Member else plan(Phase.FORMING, 1, 1))
    decode(kind, good.ljust(limit))
    with pytest.raises(RecordError, match=rf"of {limit + 1} bytes; at most {limit}"):
        decode(kind, good.ljust(limit + 1))


@pytest.mark.parametrize(
    ("record", "message"),
    [
        (
            member("a", version=RECORD_VERSION + 1),
            rf"node a at a.example runs another version .* \(records of version {RECORD_VERSION + 1}; this agent",
        ),
        (
            plan(Phase.FORMING, 1, 1, format=0),
            r"coordinated by another version .*\(records of version 0; this agent",
        ),
        (member("a", policy=Policy(3, 2)), "min_nodes 3 > max_nodes 2"),
        (plan(Phase.FORMING, 1, 1, policy=Policy(3, 2)), "min_nodes 3 > max_nodes 2"),
        (plan(Phase.FORMING, 1, 1, policy=Policy(5, 7, node_counts=(4,))), "allows none of these counts"),
        (member("a", slots=0), r"`int` >= 1 - at `\$\.slots`"),
        (member("a", bootstrap=Address("a", 0)), r"at `\$\.bootstrap\[1\]`"),
        (member("a b"), r"at `\$\.node_id`"),
        (member("x" * 129, "a-1"), r"at `\$\.node_id`"),
        (member(".."), r"at `\$\.node_id`"),
        (member("a", "."), r"at `\$\.incarnation`"),
        (member("a\n", "a-1"), r"at `\$\.node_id`"),
        (member("a", policy=Policy(lease_ttl_s=0.4)), r"at `\$\.policy\.lease_ttl_s`"),
        (member("a", stop_s=-1.0), r"at `\$\.stop_s`"),
        (member("a", replaces=("b",) * 65), r"at `\$\.replaces`"),
        *((plan(Phase.FORMING, 1, version), r"at `\$\.version`") for version in (0, 2**53 + 1, 10**30)),
        (plan(Phase.FORMING, -1, 1), r"at `\$\.generation`"),
        (plan(Phase.FORMING, 1, 1, reason="x" * 513), r"at `\$\.reason`"),
    ],
)
def test_a_record_error_names_the_invalid_field(record: Any, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(type(record), encode(record))


def test_the_version_changes_with_the_fields() -> None:
    """Unknown fields are rejected, so agents of one version have the same."""
    _, definitions = msgspec.json.schema_components(KINDS)
    fields = {
        name: [sorted(kind.get("properties", {})), kind.get("enum", [])] for name, kind in definitions.items()
    }
    digest = hashlib.sha256(json.dumps(fields, sort_keys=True).encode()).hexdigest()[:12]
    assert (RECORD_VERSION, digest) == (8, "9eb28f237275"), "the fields have changed: raise RECORD_VERSION"


@pytest.mark.parametrize(
    ("kind", "data", "message"),
    [
        (Lease, b'{"incarnation": "a", "ttl_s": 5, "colour": "blue"}', "unknown field `colour`"),
        (Lease, b'{"incarnation": "a"}', "missing required field `ttl_s`"),
        (Member, encode(member("a")).replace(b'"ready"', b'"asleep"'), r"'asleep' - at `\$\.state`"),
    ],
)
def test_an_unknown_or_missing_field_is_named(kind: Any, data: bytes, message: str) -> None:
    with pytest.raises(RecordError, match=message):
        decode(kind, data)


def seats(*places: tuple[str, int]) -> World:
    """A world of these nodes, with two workers each, at these first ranks."""
    taken = tuple(Seat(node, f"{node}-{rank}", node, 2, rank) for node, rank in places)
    return World(3, taken, Address("a", 29500), "a")


BROKEN_WORLDS = [
    (seats(("a", 0), ("b", 1)), "world 3: the first rank of b is 1, expected 2"),
    (seats(("a", 0), ("b", 3)), "world 3: the first rank of b is 3, expected 2"),
    (seats(("a", 1)), "world 3: the first rank of a is 1, expected 0"),
    (seats(("a", 0), ("a", 2)), "world 3: a has two seats"),
    (seats(), "world 3: no seats"),
]


@pytest.mark.parametrize(("broken", "message"), BROKEN_WORLDS)
def test_an_invalid_world_is_refused_in_every_record(broken: World, message: str) -> None:
    for record in (
        broken,
        plan(Phase.RUNNING, 3, 1, world=broken),
        on_disk(3, broken),
        member("a", history=on_disk(3, broken)),
    ):
        with pytest.raises(RecordError, match=message):
            decode(type(record), encode(record))


def test_an_address_is_formatted_so_that_it_can_be_dialled() -> None:
    assert str(Address("10.0.0.1", 80)) == "10.0.0.1:80"
    assert str(Address("fe80::1", 80)) == "[fe80::1]:80"


def test_a_member_record_holds_the_history_of_a_run_of_2000_nodes() -> None:
    world_of_many = world(7, *(f"gpunode{number:04}-1a2b3c4d" for number in range(2000)))
    order = tuple(seat.node_id for seat in world_of_many.seats)
    running = plan(Phase.RUNNING, 7, 1, world=world_of_many, order=order)
    known = running.forming("lost", refused={"x-1": Refusal("x" * 512)}, acknowledged={"x-1": 1})
    told = member("a", history=known.as_history)
    assert decode(Member, encode(told)) == told
    assert (known.as_history.rank, known.as_history.world) == (known.rank, world_of_many)
    with pytest.raises(RecordError, match="at most"):
        decode(Member, encode(member("a", history=known)))
