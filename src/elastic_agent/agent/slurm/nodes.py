"""What Slurm's controller knows of a node: where it is reached, and whether it is down."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping
from dataclasses import dataclass, replace

import msgspec

from elastic_agent.config.sources.slurm import is_step, step_hosts
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Waiting
from elastic_agent.transport import UnreachableError, resolve
from elastic_agent.values import Endpoint

from .scontrol import SlurmError, scontrol

SHOWN_NODES = 8


@dataclass(frozen=True, slots=True)
class SlurmNode:
    """One node, as ``scontrol show node`` describes it."""

    name: str
    address: str
    """Where Slurm itself reaches it: an address or a host name (NodeAddr)."""
    hostname: str
    """What the machine calls itself (NodeHostName)."""
    state: str

    @staticmethod
    async def query(name: str) -> SlurmNode:
        """Query the controller. Raises ``SlurmError``."""
        facts = parse_node(await scontrol("show", "node", "-o", name))
        return SlurmNode(
            name, facts.get("NodeAddr", ""), facts.get("NodeHostName", ""), facts.get("State", "")
        )


def parse_node(text: str) -> dict[str, str]:
    """What we use of ``scontrol show node -o``. Comments, which may hold anything, come later in the line."""
    line = text.lstrip().split("\n")[0]
    pairs = re.findall(r" (NodeAddr|NodeHostName|State)=(\S*)", line)
    return dict(reversed(pairs))


def reachable_endpoint(endpoint: Endpoint, environ: Mapping[str, str]) -> Endpoint:
    """The endpoint by the address that Slurm has for it, if its host is a node's name that only Slurm knows.

    Names of nodes need not be host names. Blocks while the controller is queried; unchanged if it does not answer.
    """
    if not is_step(environ) or endpoint.host not in step_hosts(environ) or _resolves(endpoint.host):
        return endpoint
    log = get_logger()
    try:
        node = asyncio.run(SlurmNode.query(endpoint.host))
    except SlurmError as error:
        log.warning(
            f"the host name {endpoint.host} does not resolve on this node, and Slurm does not report its "
            "address",
            reason=str(error),
        )
        return endpoint
    for host in (node.address, node.hostname):
        if host and _resolves(host):
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
    rest = f" and {len(missing) - SHOWN_NODES} more" if len(missing) > SHOWN_NODES else ""
    shown = ", ".join(missing[:SHOWN_NODES]) + rest
    return msgspec.structs.replace(
        waiting, reason=f"{waiting.reason}; not joined: {shown} (nodes of this Slurm step)"
    )


def _resolves(host: str) -> bool:
    try:
        return bool(resolve(host))
    except UnreachableError:
        return False
