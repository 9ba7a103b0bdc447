"""The records that the machines exchange during an examination."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, TypeVar

import msgspec
from msgspec import Meta, Struct

from elastic_agent.protocol import Count, Host, Name, Text
from elastic_agent.values import MOST_NODES

from .findings import Finding

T = TypeVar("T", bound=Struct)

LARGEST = 1 << 20
"""Bytes of a record."""

Port = Annotated[int, Meta(ge=1, le=65535)]
Nodes = Annotated[int, Meta(ge=1, le=MOST_NODES)]
Moment = Annotated[float, Meta(ge=-1e12, le=1e12)]


class Attendance(Struct, frozen=True, array_like=True):
    """A machine that waits for the others. It is written again and again, with another beat.

    So short that it arrives even where large packets are lost.
    """

    machine: Text
    least: Nodes
    most: Nodes
    address: Host
    port: Port
    """Where it answers test connections."""
    ranged_port: Port | None = None
    """The same, in ``--port-range``."""
    beat: Count = 0


class Shared(Struct, frozen=True):
    """A folder of ``--paths`` as one machine finds it."""

    path: Text
    problem: Text = ""
    """Why it is of no use; empty: there is such a folder."""
    is_writable: bool = False
    identity: Text = ""
    """Inode and names of the first entries: equal for a shared folder without changes."""
    free: Annotated[int, Meta(ge=0)] = 0


class MachineFacts(Struct, frozen=True):
    """What one machine has and found by itself."""

    machine: Text
    address: Host
    interface: Text = ""
    """The interface of its address; empty: not known."""
    is_endpoint: bool = False
    """The endpoint is an address of this machine."""
    gpus: Count = 0
    facts: dict[Text, Text] = {}
    """What is to be the same on all machines, by name."""
    environment: dict[Text, Text] = {}
    findings: tuple[Finding, ...] = ()
    shared: tuple[Shared, ...] = ()


class Connection(Struct, frozen=True, array_like=True):
    """A test connection of one machine to another one."""

    to: Name
    problem: str = ""
    """A ``pairs.Problem``; empty: it works."""
    detail: Text = ""
    port: Port = 1
    is_ranged: bool = False
    ahead_s: Moment = 0.0
    """By how much the other machine's clock is ahead, seconds."""
    round_trip_s: Moment = 0.0
    lookup_s: Moment = 0.0
    """How long looking up the host name of its address took, seconds."""


class Connections(Struct, frozen=True, array_like=True):
    """All of one machine."""

    made: tuple[Connection, ...]


class SeenPaths(Struct, frozen=True):
    """For each folder of ``--paths``: which machines' files this one sees."""

    seen: tuple[tuple[Name, ...], ...]


class Reduced(Struct, frozen=True):
    """How an all-reduce ended on one machine."""

    backend: Text
    problem: Text = ""
    took_s: Moment = 0.0


class Collectives(Struct, frozen=True):
    """All of one machine."""

    results: tuple[Reduced, ...]


def encode(record: Struct) -> bytes:
    """A record as it is stored."""
    return msgspec.json.encode(record)


def decode_all(kind: type[T], found: Mapping[str, bytes]) -> dict[str, T]:
    """Those that are records of this kind, by the id of their machine."""
    decoder = msgspec.json.Decoder(kind)
    records: dict[str, T] = {}
    for name, data in found.items():
        if len(data) <= LARGEST:
            try:
                records[name] = decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
    return records
