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
Seconds = Annotated[float, Meta(ge=0, le=1e12)]


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


class Connection(Struct, frozen=True, array_like=True):
    """A test connection of one machine to another one."""

    to: Name
    problem: str = ""
    """A ``pairs.Problem``; empty: it works."""
    detail: Text = ""
    is_ranged: bool = False


class MachineFacts(Struct, frozen=True):
    """What one machine has and found by itself, and its test connections."""

    machine: Text
    address: Host
    interface: Text = ""
    """The interface of its address; empty: not known."""
    gpus: Count = 0
    store_port: Count = 0
    """Where its interpreter hosts a store of torch; 0: it can take part in no all-reduce."""
    facts: dict[Text, Text] = {}
    """What is to be the same on all machines, by name."""
    environment: dict[Text, Text] = {}
    findings: tuple[Finding, ...] = ()
    shared: tuple[Shared, ...] = ()
    connections: tuple[Connection, ...] = ()


class Reduced(Struct, frozen=True):
    """How an all-reduce ended on one machine."""

    problem: Text = ""
    took_s: Seconds = 0.0


class Results(Struct, frozen=True):
    """What one machine found together with the others."""

    seen: tuple[tuple[Name, ...], ...] = ()
    """For each folder of ``--paths``: which machines' files this one sees."""
    reduced: dict[Text, Reduced] = {}
    """Its all-reduces, by backend."""


class Left(Struct, frozen=True):
    """This machine has read everything."""


def decode_all(kind: type[T], found: Mapping[str, bytes]) -> dict[str, T]:
    """Return those that are records of this kind, by the id of their machine."""
    decoder = msgspec.json.Decoder(kind)
    records: dict[str, T] = {}
    for name, data in found.items():
        if len(data) <= LARGEST:
            try:
                records[name] = decoder.decode(data)
            except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
                continue
    return records
