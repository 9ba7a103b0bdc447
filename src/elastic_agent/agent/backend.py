"""The rendezvous backend that the settings name, and the secret of the run."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elastic_agent.agent.slurm.nodes import reachable_endpoint
from elastic_agent.config.secrets import SecretVariables, etcd_access, run_secret
from elastic_agent.config.settings import Settings
from elastic_agent.config.value_types import ETCD
from elastic_agent.rendezvous.backends import RendezvousBackend, open_backend
from elastic_agent.transport import Secret
from elastic_agent.transport.c10d import ServeStore
from elastic_agent.values import Endpoint


def configured_secret(settings: Settings, environ: Mapping[str, str], variable: str | None) -> Secret | None:
    """Return the secret, None if there is none; ``variable`` and errors as for :func:`run_secret`."""
    found = run_secret(settings.secret_file, environ, variable)
    return Secret(found) if found else None


def configured_backend(
    settings: Settings, variables: SecretVariables, serve: ServeStore
) -> RendezvousBackend:
    """Return the rendezvous backend that the settings name.

    Args:
        settings: in force.
        variables: taken out of the environment.
        serve: serves stores.

    Raises:
        UsageError: the password for etcd or the run's secret cannot be read.
        ValueError: this machine is to host a member of etcd, which is not installed.
    """
    is_etcd = settings.rdzv_backend == ETCD
    endpoint = settings.rdzv_endpoint or Endpoint("127.0.0.1", 0)
    return open_backend(
        reachable_endpoint(endpoint, os.environ),
        etcd_access(settings, variables.etcd_password) if is_etcd else None,
        settings.state_dir,
        lease_ttl_s=settings.lease_ttl,
        fence_margin_s=settings.fence_margin,
        port_range=settings.port_range,
        secret=configured_secret(settings, os.environ, variables.secret),
        serve=serve,
        local_addr=settings.local_addr,
    )
