"""The rendezvous backends: a folder for each store."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from elastic_agent.transport import Secret
from elastic_agent.transport.c10d import ServeStore, serve_here
from elastic_agent.values import Endpoint, EtcdAccess, PortRange

if TYPE_CHECKING:
    from .base import RendezvousBackend


def open_backend(
    endpoint: Endpoint,
    access: EtcdAccess | None,
    state_dir: Path,
    *,
    lease_ttl_s: float,
    fence_margin_s: float,
    port_range: PortRange | None = None,
    secret: Secret | None = None,
    serve: ServeStore = serve_here,
) -> RendezvousBackend:
    """Return the rendezvous backend for the endpoint: etcd if ``access`` is given, else c10d. Does not connect yet.

    ``secret``: what the agents of the run share. ``serve``: serves stores.
    """
    port_rest_s = 2 * (lease_ttl_s + fence_margin_s)
    if access is None:
        from .c10d.backend import C10dBackend

        return C10dBackend(
            endpoint, state_dir, port_range=port_range, port_rest_s=port_rest_s, secret=secret, serve=serve
        )
    from .etcd.backend import EtcdBackend  # gRPC takes a quarter of a second

    return EtcdBackend(
        endpoint,
        access,
        state_dir,
        lease_ttl_s=lease_ttl_s,
        port_range=port_range,
        port_rest_s=port_rest_s,
        secret=secret,
        serve=serve,
    )
