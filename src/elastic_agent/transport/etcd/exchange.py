"""Exchanges values between programs that meet in etcd, beside its runs."""

from __future__ import annotations

from elastic_agent.transport.certificates import Secret
from elastic_agent.transport.exchange import Exchange
from elastic_agent.values import Endpoint, EtcdAccess

from .client import EtcdClient
from .kept_lease import KeptLease
from .table import EtcdTable

KEPT_S = 600.0
"""What is written disappears after this time, should the programs be killed."""

DIAL_TIMEOUT_S = 3.0


async def dial_exchange(
    endpoint: Endpoint, access: EtcdAccess, folder: str, secret: Secret | None = None
) -> Exchange:
    """Connect to one member; arguments and errors as for ``EtcdClient.dial``.

    ``folder``: of the values, other than that of the runs.
    """
    client = await EtcdClient.dial(endpoint, access, DIAL_TIMEOUT_S, secret)
    root = f"{access.prefix.rstrip('/')}/{folder}/"
    return Exchange(EtcdTable(client, root, lease=KeptLease(KEPT_S)))
