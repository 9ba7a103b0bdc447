"""Authenticates records: an HMAC over the key they are stored under, a sequence number and the record itself.

A store accepts writes of everyone who reaches its port. Agents that share a secret accept only each other's records:

    sealed record = b"EA2" | key id (4 bytes) | tag (16) | sequence number (8, big-endian) | record
    tag           = HMAC-SHA256(key, length of the path (4, big-endian) | path | sequence number | record), cut
    key           = HMAC-SHA256(HMAC-SHA256(secret, "elastic-agent records"), "epoch" | epoch)

The path is the key that the record is stored under, so that it cannot be moved to another one. The epoch is a random
number of this life of the run in its store, which its coordinator tells each node that proves to have the secret (see
:mod:`elastic_agent.transport.c10d.greeting`): records of an earlier life do not verify. Sealing is deterministic: the
same record has the same bytes, so that they can be compared and exchanged.
"""

from __future__ import annotations

import hmac
import secrets
from dataclasses import dataclass, field

MAGIC = b"EA2"
ID_BYTES, TAG_BYTES, SEQUENCE_BYTES, EPOCH_BYTES = 4, 16, 8, 16
_HEAD_BYTES = len(MAGIC) + ID_BYTES + TAG_BYTES + SEQUENCE_BYTES


class Unverified(bytes):
    """What a store holds in place of a record, and is not sealed with the run's key.

    Its bytes are no record of any kind. ``raw`` is what the store holds; ``why`` is the reason, in words.
    """

    raw: bytes
    why: str

    @classmethod
    def of(cls, raw: bytes, why: str) -> Unverified:
        """What stands in the store, and why it does not count."""
        made = cls(b"\x00" + raw)
        made.raw, made.why = raw, why
        return made


def verified(data: bytes | None) -> bytes:
    """What is there and verifies; else nothing."""
    return b"" if data is None or isinstance(data, Unverified) else data


@dataclass(frozen=True)
class Secret:
    """What the agents of a run share: one secret, or during a rotation two, of which the first one seals."""

    values: tuple[bytes, ...] = field(repr=False)

    @classmethod
    def random(cls) -> Secret:
        """One that no other process has."""
        return cls((secrets.token_bytes(32),))

    @property
    def ids(self) -> tuple[str, ...]:
        """Names of the secrets, which tell nothing about them: 8 hexadecimal digits each."""
        return tuple(_id(_root(value)).hex() for value in self.values)

    def seal(self, epoch: bytes = b"") -> Seal:
        """The seal of an epoch; the empty one is for what is written before the epoch is known."""
        return Seal(tuple((_id(root), _epoch_key(root, epoch)) for root in map(_root, self.values)))


class Seal:
    """Seals and opens records of one epoch. For any thread."""

    def __init__(self, keys: tuple[tuple[bytes, bytes], ...]) -> None:
        """``keys``: with their ids; the first one seals."""
        self._keys = dict(keys)
        self._id = keys[0][0]

    def close(self, path: str, record: bytes, sequence: int = 0) -> bytes:
        """The sealed record.

        Args:
            path: the key that it is stored under.
            record: what to seal.
            sequence: a number that grows with each record under this path, where an older one is not to come back.
        """
        number = sequence.to_bytes(SEQUENCE_BYTES, "big")
        return b"".join((MAGIC, self._id, _tag(self._keys[self._id], path, number, record), number, record))

    def open(self, path: str, data: bytes) -> bytes:
        """The record, or :class:`Unverified`."""
        return self.open_numbered(path, data)[0]

    def open_numbered(self, path: str, data: bytes) -> tuple[bytes, int]:
        """The record and its sequence number; ``Unverified`` and 0 if it does not verify."""
        if not data.startswith(MAGIC) or len(data) < _HEAD_BYTES:
            return Unverified.of(data, "it is not authenticated"), 0
        key_id = data[len(MAGIC) : len(MAGIC) + ID_BYTES]
        key = self._keys.get(key_id)
        if key is None:
            return Unverified.of(data, f"it is authenticated with another secret (key id {key_id.hex()})"), 0
        tag = data[len(MAGIC) + ID_BYTES : _HEAD_BYTES - SEQUENCE_BYTES]
        number, record = data[_HEAD_BYTES - SEQUENCE_BYTES : _HEAD_BYTES], data[_HEAD_BYTES:]
        if not hmac.compare_digest(tag, _tag(key, path, number, record)):
            why = (
                "its code does not match: it was changed, copied from another key, or is from an earlier run"
            )
            return Unverified.of(data, why), 0
        return record, int.from_bytes(number, "big")


def _root(secret: bytes) -> bytes:
    return hmac.digest(secret, b"elastic-agent records", "sha256")


def _id(root: bytes) -> bytes:
    return hmac.digest(root, b"id", "sha256")[:ID_BYTES]


def _epoch_key(root: bytes, epoch: bytes) -> bytes:
    return hmac.digest(root, b"epoch" + epoch, "sha256")


def _tag(key: bytes, path: str, number: bytes, record: bytes) -> bytes:
    name = path.encode()
    message = b"".join((len(name).to_bytes(4, "big"), name, number, record))
    return hmac.digest(key, message, "sha256")[:TAG_BYTES]
