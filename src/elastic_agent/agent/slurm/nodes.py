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
    """Return the endpoint by the addresses that Slurm has for it, if a host is a node's name that only Slurm knows.

    Names of nodes need not be host names. Of several hosts all are replaced: each node may know its own name, and the
    list has to be the same on all. Blocks while the controller is queried; unchanged if it does not answer.
    """
    hosts = step_hosts(environ) if is_step(environ) else []
    named = [member.host for member in endpoint.members if member.host in hosts]
    unknown = next((host for host in named if not _resolves(host)), None)
    if unknown is None:
        return endpoint
    log = get_logger()
    problem = f"the host name {unknown} does not resolve on this node"
    try:
        found = {host: _address_of(host) for host in named}
    except CommandError as error:
        log.warning(f"{problem}, and Slurm does not report its address", reason=str(error))
        return endpoint
    log.info(f"{problem}; using what Slurm reports: {', '.join(found.values())}")
    first, *others = (
        replace(each, host=found.get(each.host, each.host), others=()) for each in endpoint.members
    )
    return replace(first, others=tuple(others))


def _address_of(host: str) -> str:
    """Return what Slurm has for this node that resolves; else its name. Raises CommandError."""
    node = parse_node(asyncio.run(scontrol("show", "node", "-o", host)))
    return next((name for key in ("NodeAddr", "NodeHostName") if _resolves(name := node.get(key, ""))), host)


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
