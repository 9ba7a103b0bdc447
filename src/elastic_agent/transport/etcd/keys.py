"""Where the keys of elastic-agent lie in etcd, and how long its data have been there.

The keys are those of :mod:`elastic_agent.transport.keys`, below ``<prefix>/1/``. Beside the random name of this life
of the etcd (another one means that its data were lost), its key ``id`` names an etcd lease, whose remaining time shows
its age.
"""

from __future__ import annotations

import re
import secrets

from elastic_agent.transport.base import NotAStoreError
from elastic_agent.transport.keys import STORE_ID

from .client import EtcdClient, is_missing, put

AGE_KNOWN_S = 2 * 3600
"""How long the age of an etcd's life is known: for the longest lease, and as much margin."""

NAME_WITH_AGE = re.compile(r"[0-9a-f]{16}L([0-9a-f]{1,16})")


def root_of(prefix: str) -> str:
    """Return what precedes every key of the runs below this prefix."""
    return f"{prefix.rstrip('/')}/1/"


def id_key(root: str) -> bytes:
    """Return the key of the name of this etcd's life."""
    return f"{root}{STORE_ID}".encode()


async def store_id(client: EtcdClient, root: str) -> str:
    """Return the random name of this etcd's life; written by the first agent that connects.

    Raises:
        NotAStoreError: something else of that name is there.
    """
    key = id_key(root)
    found = await client.get(key)
    if found is None:
        await _begin_life(client, key)
        found = await client.get(key)
    name = found.value.decode("ascii", "replace") if found is not None else ""
    if not (name.isalnum() and len(name) <= 64):
        raise NotAStoreError(
            f"{key.decode()} in etcd was not written by elastic-agent: {name[:40]!r}; give another "
            "--etcd-prefix"
        )
    return name


async def _begin_life(client: EtcdClient, key: bytes) -> None:
    """Name this etcd's life, unless another agent has just done so."""
    age = await client.grant(AGE_KNOWN_S)  # when the data that were there before, if any, are gone already
    name = f"{secrets.token_hex(8)}L{age:x}"
    if not (await client.transact([is_missing(key)], [put(key, name.encode())])).succeeded:
        await client.revoke(age)
