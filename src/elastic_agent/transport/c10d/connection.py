"""Connections to a c10d store, and the run id that the agents of a job agree on there."""

from __future__ import annotations

import os
import socket

from elastic_agent.transport.addresses import connect, is_local, local_address_towards, resolve
from elastic_agent.transport.base import NotAStoreError, Obstacle, UnreachableError
from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.port_holder import holder_of
from elastic_agent.transport.record_reader import log_invalid
from elastic_agent.values import Endpoint

from .keys import CLEARING, ROOT, enlist, name_in, names_in, run_prefix
from .secured import checked
from .store import StoreClient

BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""


def open_store(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None = None
) -> tuple[StoreClient, str, str]:
    """Connect to the store at the endpoint; returns the connection, the store's id, and our address on the way there.

    With ``secret``, the connection is in TLS.

    Raises:
        UnreachableError: nothing answers, or not in time.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: what answers is not a store of elastic-agent.
        StoreLostError: it broke off in between.
    """
    sock = _connected(endpoint, timeout_s)
    try:
        local_address = local_address_towards(endpoint.host, sock)
        sock = checked(sock, endpoint, timeout_s, secret)
    except UnreachableError as error:
        sock.close()
        what = f"accepts connections but did not answer within {timeout_s:g} s"
        raise _named(endpoint, what, error) from None
    except BaseException:
        sock.close()
        raise
    client = StoreClient.on(sock, str(endpoint))
    return client, _store_id(client, endpoint), local_address


def _connected(endpoint: Endpoint, timeout_s: float) -> socket.socket:
    try:
        return connect(endpoint.host, endpoint.port, timeout_s)
    except UnreachableError as error:  # the queue of a program that takes no connections from it may be full
        what = f"accepts no more connections (no answer within {timeout_s:g} s)"
        raise _named(endpoint, what, error) from None


def _named(endpoint: Endpoint, what: str, error: UnreachableError) -> UnreachableError:
    """The error to raise instead, if a process of this machine has the port and does not answer: one that names it."""
    is_silence = error.obstacle in (Obstacle.NO_ANSWER, Obstacle.SILENT)
    holder = holder_here(endpoint) if is_silence else ""
    if not holder:
        return error
    return UnreachableError(
        f"{endpoint} {what}: {holder} of this machine has the port (if that serves the store of a run, it is "
        "frozen or overloaded)",
        Obstacle.SILENT,
    )


def holder_here(endpoint: Endpoint) -> str:
    """The other process of this machine that has the endpoint's port, in words; empty: none, or it is not known."""
    try:
        holder = holder_of(endpoint.port) if is_local(resolve(endpoint.host)) else ""
    except (UnreachableError, OSError):
        return ""
    return "" if holder.endswith(f"(pid {os.getpid()})") else holder


def _store_id(client: StoreClient, endpoint: Endpoint) -> str:
    """The id that our hosts write into their stores when they are born."""
    key = f"{ROOT}/id"
    data = client.peek(key)
    if data is None and client.wait(key, BIRTH_S):
        data = client.peek(key)
    name = name_in(data or b"")
    if name is None:
        raise NotAStoreError(
            f"the store at {endpoint} was not created by elastic-agent (is a torchrun job using the "
            "port?); use another port, or stop that job"
        )
    return name


def agree_run_id(
    endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float, secret: Secret | None = None
) -> str:
    """The run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    client, _, _ = open_store(endpoint, timeout_s, secret)
    key = f"{ROOT}/default/{fingerprint}"
    stored = client.exchange(key, b"", proposal.encode())
    while (name := name_in(stored)) is None:
        expected = b""
        if stored != CLEARING:  # not written by elastic-agent
            log_invalid(f"{key}: {stored[:64]!r} is not a run id")
            expected = stored
        stored = client.exchange(key, expected, proposal.encode())
    jobs = f"{run_prefix(name)}/jobs"
    if fingerprint not in names_in(client.peek(jobs) or b""):
        enlist(client, jobs, fingerprint)
        client.confirm()
    return name


def release_run_id(
    endpoint: Endpoint, fingerprint: str, run_id: str, timeout_s: float, secret: Secret | None = None
) -> None:
    """That run is over: the next job with this fingerprint is another run."""
    client, _, _ = open_store(endpoint, timeout_s, secret)
    client.exchange(f"{ROOT}/default/{fingerprint}", run_id.encode(), b"")
