"""Checks settings against the Slurm step that the agent is a task of.

Settings of the user take precedence over those from Slurm. Some of them can only be mistakes: these are an error
now, instead of a wait of ten minutes for nodes that cannot join.
"""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.config.builder import SettingsBuilder
from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.config.value_types import ETCD


def check_allocation(builder: SettingsBuilder, environ: Mapping[str, str]) -> None:
    """Compare node count and endpoint with the step's; nothing to compare outside Slurm.

    Raises:
        UsageError: more nodes are needed than Slurm allocated, and no endpoint is given where others could join.
    """
    hosts = step_hosts(environ) if is_step(environ) else []
    if not hosts or builder.values["standalone"]:
        return
    shown = environ["SLURM_STEP_NODELIST"]
    endpoint = builder.values["rdzv_endpoint"]
    own = builder.is_given("rdzv_endpoint") and not builder.is_site_default("rdzv_endpoint")
    own = own or builder.is_given("master_addr") or builder.values["rdzv_backend"] == ETCD
    if not own and builder.values["nnodes"].least > len(hosts):
        raise builder.wrong(
            "nnodes",
            f"but Slurm allocated only {len(hosts)} to this step ({shown})",
            f"at most {len(hosts)}, or more nodes from sbatch --nodes and srun --nodes",
        )
    if own and endpoint is not None and builder.values["rdzv_backend"] != ETCD:
        _note_foreign_host(builder, endpoint.host, hosts, shown)


def _note_foreign_host(builder: SettingsBuilder, host: str, hosts: list[str], shown: str) -> None:
    """Right for a server outside the job, and for a run of several jobs; otherwise probably a stale setting."""
    known = {name.split(".")[0] for name in hosts}
    is_address = host.replace(".", "").isdecimal() or ":" in host
    if host in ("localhost", "127.0.0.1", "::1") and len(hosts) > 1:
        builder.warn(
            f"{builder.sources['rdzv_endpoint']} is {host}, which on each of this step's nodes ({shown}) "
            f"is the node itself; without it, the endpoint is on {hosts[0]}"
        )
    elif not is_address and host.split(".")[0] not in known:
        builder.note(
            f"{builder.sources['rdzv_endpoint']} names {host}, which is not a node of this step ({shown}): "
            "the store must run there, for example with elastic-agent serve"
        )
