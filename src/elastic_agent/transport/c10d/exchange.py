"""Exchanges values between programs that meet at a c10d store, beside its runs."""

from __future__ import annotations

from elastic_agent.transport.certificates import Secret
from elastic_agent.values import Endpoint

from .connection import open_store
from .keys import enlist, names_in
from .store import StoreClient


def dial_exchange(
    endpoint: Endpoint, folder: str, timeout_s: float, secret: Secret | None = None
) -> C10dExchangeLink:
    """A connection to the store at the endpoint; other arguments and errors as for :func:`open_store`.

    ``folder``: of all keys; other than that of the runs.
    """
    client, _, local_address = open_store(endpoint, timeout_s, secret)
    return C10dExchangeLink(client, folder, local_address)


class C10dExchangeLink:
    """Values in a c10d store (see ``ExchangeLink``)."""

    def __init__(self, client: StoreClient, folder: str, local_address: str) -> None:
        self._client = client
        self._folder = folder
        self.local_address = local_address

    def write(self, topic: str, name: str, value: bytes) -> None:
        """Replace what is stored under this name."""
        roster = self._key(topic, "names")
        if name not in names_in(self._client.peek(roster) or b""):
            enlist(self._client, roster, name)
        self._client.put(self._key(topic, f"of/{name}"), value)
        self._client.confirm()

    def read(self, topic: str) -> dict[str, bytes]:
        """All values of a topic, by name."""
        names = names_in(self._client.peek(self._key(topic, "names")) or b"")
        keys = {name: self._key(topic, f"of/{name}") for name in names}
        found = self._client.peek_many([*keys.values()])
        return {name: found[key] for name, key in keys.items() if key in found}

    def decide(self, topic: str, value: bytes) -> bytes:
        """The decision: the first value proposed; ``b""`` proposes none, and answers ``b""`` if there is none."""
        key = self._key(topic, "decision")
        if not value:
            return self._client.peek(key) or b""
        return self._client.exchange(key, b"", value)

    def remove(self, topic: str) -> None:
        """Remove everything of a topic."""
        roster = self._key(topic, "names")
        names = names_in(self._client.peek(roster) or b"")
        self._client.delete([*(self._key(topic, f"of/{name}") for name in names), roster])
        self._client.delete([self._key(topic, "decision")])

    def _key(self, topic: str, name: str) -> str:
        return f"{self._folder}/{topic}/{name}"

    def close(self) -> None:
        """Release the connection; it closes when no call is in progress any more."""
        self._client.close()
