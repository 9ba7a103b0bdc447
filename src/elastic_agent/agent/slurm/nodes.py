"""The nodes of a Slurm step: at which addresses they are reached, and which are missing."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import replace

import msgspec

from elastic_agent.agent.run_command import CommandError
from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.logs import get_logger
from elastic_agent.printable import listed
from elastic_agent.protocol import Waiting
from elastic_agent.transport import UnreachableError, resolve
from elastic_agent.values import Endpoint

from .job import scontrol

SHOWN_NODES = 8


def parse_node(text: str) -> dict[str, str]:
    """Return where Slurm reaches a node (NodeAddr), and what the machine calls itself (NodeHostName).

    ``text``: from ``scontrol show node -o``. Comments, which may hold anything, come later in the line.
    """
    line = text.lstrip().split("\n")[0]
    pairs = re.findall(r" (NodeAddr|NodeHostName)=(\S*)", line)
    return dict(reversed(pairs))


def reachable_endpoint(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    """Return the endpoint by the address that Slurm has for it, if its host is a node's name that only Slurm knows.

    Names of nodes need not be host names. Blocks while the controller is queried; unchanged if it does not answer.
    """
    if not is_step(environ) or endpoint.host not in step_hosts(environ) or _resolves(endpoint.host):
        return endpoint
    log = get_logger()
    try:
        node = parse_node(asyncio.run(scontrol("show", "node", "-o", endpoint.host)))
    except CommandError as error:
        log.warning(
            f"the host name {endpoint.host} does not resolve on this node, and Slurm does not report its "
            "address",
            reason=str(error),
        )
        return endpoint
    for host in filter(None, map(node.get, ("NodeAddr", "NodeHostName"))):
        if _resolves(host):
            log.info(
                f"the host name {endpoint.host} does not resolve on this node; using the address "
                f"reported by Slurm, {host}"
            )
            return replace(endpoint, host=host)
    return endpoint


def with_missing_nodes(waiting: Waiting, environ: Mapping[str, str]) -> Waiting:
    """Add the names of this step's nodes whose agents have not joined; unchanged if node ids are not Slurm's names."""
    hosts = step_hosts(environ) if waiting.joined and is_step(environ) else []
    missing = [host for host in hosts if host not in waiting.joined]
    if not missing or len(hosts) - len(missing) != len(waiting.joined):
        return waiting
    reason = f"{waiting.reason}; not joined: {listed(missing, SHOWN_NODES)} (nodes of this Slurm step)"
    return msgspec.structs.replace(waiting, reason=reason)


def _resolves(host: str) -> bool:
    try:
        return bool(resolve(host))
    except UnreachableError:
        return False
