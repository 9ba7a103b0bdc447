"""Where the records of a run lie in etcd.

Keys, all under ``<prefix>/1/``:

    id                       random name of this etcd's life (another one means that its data were lost), and
                             the etcd lease whose remaining time shows its age
    r/<run>/life             random name of this life of the run's records, which ends when they are removed
    r/<run>/m/<incarnation>  member record        r/<run>/l/<incarnation>  lease
    r/<run>/plan             the newest plan (see :mod:`.plans`)
    r/<run>/status           what the coordinator waits for (protocol/waiting.py)
    r/<run>/leader           the coordinator
    r/<run>/report/<node>    the node's newest report (see :mod:`elastic_agent.diagnosis.records`)
    r/<run>/ended            of the last life: generation, outcome and what else the next one has to know
"""

from __future__ import annotations

import re
import secrets
from typing import Any

from elastic_agent.transport.base import NotAStoreError

from .client import EtcdClient, get, is_missing, put

AGE_KNOWN_S = 2 * 3600
"""How long the age of an etcd's life is known: for the longest lease, and as much margin."""

NAME_WITH_AGE = re.compile(r"[0-9a-f]{16}L([0-9a-f]{1,16})")

MAX_STATUS_CHARS = 2048


class RunKeys:
    """Where the records of one run lie."""

    def __init__(self, prefix: str, run_id: str) -> None:
        """``prefix``: of everything of ours in this etcd."""
        self.shown = f"{prefix.rstrip('/')}/1/r/{run_id}"
        self.root = f"{self.shown}/".encode()
        self.members, self.leases = self.root + b"m/", self.root + b"l/"
        self.reports = self.root + b"report/"
        self.plan, self.status, self.leader = (self.root + name for name in (b"plan", b"status", b"leader"))
        self.life, self.ended = self.root + b"life", self.root + b"ended"
        self.id = id_key(prefix)

    def member(self, incarnation: str) -> bytes:
        """The key of its member record."""
        return self.members + incarnation.encode()

    def lease(self, incarnation: str) -> bytes:
        """The key of its lease."""
        return self.leases + incarnation.encode()


def store_id(client: EtcdClient, prefix: str) -> str:
    """The random name of this etcd's life; written by the first agent that connects.

    Raises:
        NotAStoreError: something else of that name is there.
    """
    key = id_key(prefix)
    found = client.get(key)
    if found is None:
        _begin_life(client, key)
        found = client.get(key)
    name = found.value.decode("ascii", "replace") if found is not None else ""
    if not (name.isalnum() and len(name) <= 64):
        raise NotAStoreError(
            f"{key.decode()} in etcd was not written by elastic-agent: {name[:40]!r}; give another "
            "--etcd-prefix"
        )
    return name


def id_key(prefix: str) -> bytes:
    return f"{prefix.rstrip('/')}/1/id".encode()


def _begin_life(client: EtcdClient, key: bytes) -> None:
    """Name this etcd's life, unless another agent has just done so."""
    age = client.grant(AGE_KNOWN_S)  # when the data that were there before, if any, are gone already
    name = f"{secrets.token_hex(8)}L{age:x}"
    if not client.transact([is_missing(key)], [put(key, name.encode())]).succeeded:
        client.revoke(age)


def run_life(client: EtcdClient, keys: RunKeys) -> bytes:
    """The name of this life of the run's records, which the first node begins."""
    found = client.get(keys.life)
    if found is not None:
        return bytes(found.value)
    name = secrets.token_hex(4).encode()
    done = client.transact([is_missing(keys.life)], [put(keys.life, name)], [get(keys.life)])
    return name if done.succeeded else value_in(done.responses[0]) or b""


def found_in(response: Any) -> Any | None:
    """What one operation of a transaction found: a KeyValue, or None."""
    found = response.response_range.kvs
    return found[0] if found else None


def value_in(response: Any) -> bytes | None:
    found = found_in(response)
    return found.value if found is not None else None
