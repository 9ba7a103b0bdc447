"""Which records of a run in etcd are authenticated, and in which epoch.

The epoch is the record of the run's life in etcd and the revision in which it was written. etcd counts revisions
itself: who writes an earlier life back begins another epoch, in which nothing of before verifies.
"""

from __future__ import annotations

import re
from collections import deque
from dataclasses import dataclass

from elastic_agent.transport.base import WrongKeyError
from elastic_agent.transport.sealed_records import RecordKinds, RunSeal, SealedRecords
from elastic_agent.transport.sealing import ID_BYTES, MAGIC, Secret, Unverified

_REMEMBERED = 8
"""So many connections of a process are asked what they have seen; more are not open at once."""


@dataclass(frozen=True)
class RunLife:
    """A life of a run's records in etcd."""

    stored: bytes
    """What etcd holds."""
    name: str
    revision: int
    """In which it was written."""


class RunSecret:
    """How this process seals and opens the records of one run. For any thread."""

    def __init__(self, secret: Secret, run_root: str) -> None:
        """``run_root``: what the keys of the run begin with."""
        self._secret = secret
        self._run = run_root.rstrip("/").rpartition("/")[2]
        self._life_path = f"{run_root}life"
        root = re.escape(run_root)
        self._kinds = RecordKinds(
            of_run=re.compile(rf"{root}(?:(?:m|l|report)/[^/]+|plan|status)"),
            without_epoch=re.compile(rf"{root}ended"),
            member=re.compile(rf"{root}m/[^/]+"),
            lease=re.compile(rf"{root}l/[^/]+"),
            plan=re.compile(rf"{root}plan"),
        )
        self._given: deque[tuple[RunLife, RunSeal]] = deque(maxlen=_REMEMBERED)

    def sealed_life(self, name: bytes) -> bytes:
        """What to store for a life of this name."""
        return self._secret.seal().close(self._life_path, name)

    def name_of_life(self, stored: bytes) -> bytes:
        """The name of this life.

        Raises:
            WrongKeyError: it was not written by an agent with the secret.
        """
        name = self._secret.seal().open(self._life_path, stored)
        if isinstance(name, Unverified):
            raise WrongKeyError(_mismatch(self._run, self._secret, stored))
        return name

    def records(self, life: RunLife | None) -> SealedRecords:
        """For a new connection; what other connections have seen in this life is old for this one.

        None: the run has no records; those of its last known life are read.
        """
        base = self._secret.seal()
        if life is None:
            life = self._given[-1][0] if self._given else None
        epoch = b"%d/%s" % (life.revision, life.stored) if life is not None else b"none"
        newest: dict[str, int] = {}
        for other, seen in list(self._given):
            if other == life:
                for path, number in list(seen.newest.items()):
                    newest[path] = max(number, newest.get(path, 0))
        seals = RunSeal(base, self._secret.seal(epoch), newest)
        if life is not None:
            self._given.append((life, seals))
        return SealedRecords(seals, self._kinds)


def check_needs_no_secret(stored: bytes, run: str) -> None:
    """Raise ``WrongKeyError`` if this life was written by an agent with a secret."""
    if stored.startswith(MAGIC):
        raise WrongKeyError(
            f"run {run} in etcd accepts only agents with its secret (key id {_key_id(stored)}), and this agent has "
            "none; pass the same --secret-file to every agent"
        )


def _mismatch(run: str, secret: Secret, stored: bytes) -> str:
    if not stored.startswith(MAGIC):
        return (
            f"run {run} in etcd was started without a secret, and this agent has one (key id {secret.ids[0]}); start "
            "every agent with the same --secret-file, or use another --rdzv-id"
        )
    if _key_id(stored) in secret.ids:
        return (
            f"run {run} in etcd has a life record that was changed or copied by another program; stop every agent of "
            "the run, remove its keys, and restrict write access to them (docs/etcd.md)"
        )
    return (
        f"run {run} in etcd has another secret (key id {_key_id(stored)}) than this agent (key id {secret.ids[0]}); "
        "give every agent the same --secret-file"
    )


def _key_id(stored: bytes) -> str:
    return stored[len(MAGIC) : len(MAGIC) + ID_BYTES].hex()
