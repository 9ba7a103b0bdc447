"""Connections to a c10d store for each use, and the run id that the agents of a job agree on there."""

from __future__ import annotations

import contextlib
import re

from elastic_agent.transport.addresses import local_address_towards
from elastic_agent.transport.base import NotAStoreError, OtherVersionError
from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.keys import CLEARING, JOBS, RELEASED, STORE_ID, name_in
from elastic_agent.transport.record_reader import log_invalid
from elastic_agent.transport.records import NodeRecords
from elastic_agent.transport.report_records import ReportRecords
from elastic_agent.values import Endpoint

from .dialling import open_stream
from .table import CALL_TIMEOUT_S, ROOT, C10dTable
from .tcpstore import TCPStoreClient

BIRTH_S = 2.0
"""A new store's id is written within this time of its port being open."""

_OTHER_ID = re.compile(rf"elastic-agent/\d+/{STORE_ID}")


async def open_table(
    endpoint: Endpoint, timeout_s: float, secret: Secret | None = None, root: str = ROOT
) -> C10dTable:
    """Connect to the store at the endpoint.

    With ``secret``, the connection is in TLS. ``root``: of the keys of the table.

    Raises:
        UnreachableError: nothing answers, or not in time.
        WrongKeyError: the store has another secret, or only one of the two sides has one.
        NotAStoreError: what answers is not a store of elastic-agent.
        OtherVersionError: another version of elastic-agent created it.
        StoreLostError: it broke off in between.
    """
    stream = await open_stream(endpoint, timeout_s, secret)
    client = TCPStoreClient(stream, str(endpoint), CALL_TIMEOUT_S)
    try:
        local_address = local_address_towards(endpoint.host, stream.own_address)
        return C10dTable(client, local_address, await _store_id(client, endpoint), root)
    except BaseException:
        client.close()
        raise


async def _store_id(store: TCPStoreClient, endpoint: Endpoint) -> str:
    """Return the id that our hosts write into their stores when they begin."""
    key = ROOT + STORE_ID
    (data,) = await store.get([key])
    if not data and await store.wait(key, BIRTH_S):
        (data,) = await store.get([key])
    name = name_in(data)
    if name is not None:
        return name
    if any(_OTHER_ID.fullmatch(found) for found in await store.list_keys()):
        raise OtherVersionError(
            f"the store at {endpoint} was created by another version of elastic-agent",
            remedy="install the same version on all machines, elastic-agent serve included",
        )
    raise NotAStoreError(
        f"the store at {endpoint} was not created by elastic-agent (is a torchrun job using the "
        "port?); use another port, or stop that job"
    )


async def agree_run_id(
    endpoint: Endpoint, fingerprint: str, proposal: str, timeout_s: float, secret: Secret | None = None
) -> str:
    """Return the run id of this job at the endpoint: the one agreed before, else ``proposal``."""
    key = JOBS + fingerprint
    with contextlib.closing(await open_table(endpoint, timeout_s, secret)) as table:
        stored = await table.swap(key, None, proposal.encode())
        while (name := name_in(stored or b"")) is None:
            if stored is None or stored == CLEARING:
                expected = None
            else:
                expected = stored
                if not stored.startswith(RELEASED):
                    log_invalid(f"{table.root}{key}: {stored[:64]!r} is not a run id")
            stored = await table.swap(key, expected, proposal.encode())
    return name


async def release_run_id(
    endpoint: Endpoint, fingerprint: str, run_id: str, timeout_s: float, secret: Secret | None = None
) -> None:
    """Have the next job with this fingerprint be another run: that one is over."""
    with contextlib.closing(await open_table(endpoint, timeout_s, secret)) as table:
        await table.swap(JOBS + fingerprint, run_id.encode(), RELEASED + run_id.encode())


async def dial(
    endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None
) -> NodeRecords:
    """Connect a node to a run at the endpoint; other arguments and errors as for :func:`open_table`."""
    table = await open_table(endpoint, timeout_s, secret)
    try:
        return await NodeRecords.open(table, run_id)
    except BaseException:
        table.close()
        raise


async def dial_reports(
    endpoint: Endpoint, run_id: str, timeout_s: float, secret: Secret | None = None
) -> ReportRecords:
    """Connect to the reports of a run at the endpoint; other arguments and errors as for :func:`open_table`."""
    return ReportRecords(await open_table(endpoint, timeout_s, secret), run_id)
