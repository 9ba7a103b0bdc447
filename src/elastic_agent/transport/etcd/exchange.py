"""Exchanges values between programs that meet in etcd, beside its runs."""

from __future__ import annotations

from elastic_agent.transport.certificates import Secret
from elastic_agent.values import Endpoint, EtcdAccess

from .client import EtcdClient, delete, get, is_missing, prefix_end, put
from .keys import value_in

KEPT_S = 600
"""What is written disappears after this time, should the programs be killed."""

DIAL_TIMEOUT_S = 3.0


def dial_exchange(
    endpoint: Endpoint, access: EtcdAccess, folder: str, secret: Secret | None = None
) -> EtcdExchangeLink:
    """A connection to one member; arguments and errors as for ``EtcdClient.dial``.

    ``folder``: of the values, other than that of the runs.
    """
    client = EtcdClient.dial(endpoint, access, DIAL_TIMEOUT_S, secret)
    try:
        return EtcdExchangeLink(client, f"{access.prefix.rstrip('/')}/{folder}/")
    except BaseException:
        client.close()
        raise


class EtcdExchangeLink:
    """Values in etcd (see ``ExchangeLink``)."""

    def __init__(self, client: EtcdClient, folder: str) -> None:
        self._client = client
        self._folder = folder
        self._lease = client.grant(KEPT_S)
        self.local_address = client.local_address

    def write(self, topic: str, name: str, value: bytes) -> None:
        """Replace what is stored under this name."""
        self._client.transact([], [put(self._key(topic, f"of/{name}"), value, self._lease)])

    def read(self, topic: str) -> dict[str, bytes]:
        """All values of a topic, by name."""
        prefix = self._key(topic, "of/")
        found = self._client.range(prefix, prefix_end(prefix)).kvs
        return {one.key[len(prefix) :].decode("utf-8", "replace"): bytes(one.value) for one in found}

    def decide(self, topic: str, value: bytes) -> bytes:
        """The decision: the first value proposed; ``b""`` proposes none, and answers ``b""`` if there is none."""
        key = self._key(topic, "decision")
        if not value:
            found = self._client.get(key)
            return bytes(found.value) if found is not None else b""
        done = self._client.transact([is_missing(key)], [put(key, value, self._lease)], [get(key)])
        return value if done.succeeded else value_in(done.responses[0]) or b""

    def remove(self, topic: str) -> None:
        """Remove everything of a topic."""
        prefix = self._key(topic, "")
        self._client.transact([], [delete(prefix, prefix_end(prefix))])

    def _key(self, topic: str, name: str) -> bytes:
        return f"{self._folder}{topic}/{name}".encode()

    def close(self) -> None:
        """Release the connection; ends calls in progress."""
        self._client.close()
