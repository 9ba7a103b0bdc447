"""Checks of this machine's network: its names, its interfaces, the route to the endpoint, the endpoint's port."""

from __future__ import annotations

import contextlib
import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil

from elastic_agent.transport import (
    Obstacle,
    UnreachableError,
    how_to_reach,
    interface_of,
    is_loopback_name,
    resolve,
)
from elastic_agent.values import Endpoint

from .findings import Finding, error


def interfaces() -> dict[str, tuple[str, ...]]:
    """Return the addresses of this machine's interfaces that are up and have any, by the name of the interface."""
    stats, found = psutil.net_if_stats(), {}
    for name, entries in psutil.net_if_addrs().items():
        addresses = tuple(
            entry.address.partition("%")[0]
            for entry in entries
            if entry.family in (socket.AF_INET, socket.AF_INET6)
        )
        if addresses and name in stats and stats[name].isup:
            found[name] = addresses
    return found


def other_addresses(found: dict[str, tuple[str, ...]]) -> list[str]:
    """Return the addresses at which other machines could reach this one."""
    every = [ipaddress.ip_address(address) for addresses in found.values() for address in addresses]
    return [str(address) for address in every if not (address.is_loopback or address.is_link_local)]


def route_interface(host: str) -> str | None:
    """Return the interface of the route to a host; None: there is no route, or it is this machine itself."""
    with contextlib.suppress(UnreachableError, OSError):
        for family, address in resolve(host):
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect((address, 9))  # sends nothing: it only queries the routing table
                return interface_of(str(probe.getsockname()[0]))
    return None


# -- names ----------------------------------------------------------------------------------------


def check_endpoint(endpoint: Endpoint) -> Iterator[Finding]:
    """Check that the endpoint's name means the same machine everywhere, and resolves here."""
    for member in endpoint.members:
        host = member.host
        if is_loopback_name(host):
            own = other_addresses(interfaces())
            hint = f" (this machine's: {', '.join(own[:3])})" if own else ""
            yield error(
                "loopback-endpoint",
                f"the endpoint {member} means a different machine on every machine",
                f"pass an address of one of the machines that the others can reach{hint}; ignore this if all agents "
                "run on this machine",
            )
            continue
        try:
            found = [address for _, address in resolve(host)]
        except UnreachableError as failure:
            yield error(
                "endpoint-name",
                failure.problem,
                "add the name to the DNS or to /etc/hosts, or pass the machine's address as --rdzv-endpoint",
            )
            continue
        if all(_is_loopback(address) for address in found) and not _is_own_name(host):
            yield error(
                "loopback-endpoint",
                f"the endpoint's name {host} resolves to {found[0]} on this machine, although it is not its name",
                f"remove {host} from the line of {found[0]} in /etc/hosts",
            )


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address.partition("%")[0]).is_loopback


def _is_own_name(host: str) -> bool:
    own = os.uname().nodename.lower().partition(".")[0]
    return host.lower().partition(".")[0] == own


# -- the port of the endpoint ---------------------------------------------------------------------


def explain_unreachable(endpoint: Endpoint, problem: str, obstacle: Obstacle, store: str) -> Finding:
    """Explain why nothing answers at the endpoint, seen from this machine.

    Args:
        endpoint: of the run.
        problem: what the connection ended with, in words.
        obstacle: the same as a kind.
        store: what is to be started there.
    """
    first = endpoint.members[0]
    remedy = how_to_reach(obstacle, first.host, first.port, store)
    cause = f"cannot reach the endpoint {endpoint}: {problem}"
    return error("endpoint-unreachable", cause, remedy or "remove that cause, then run the doctor again")


def foreign_port_holder(endpoint: Endpoint, problem: str) -> Finding:
    """Report that something that is no store of elastic-agent has the endpoint's port."""
    return error(
        "port-in-use",
        f"port {endpoint.port} of {endpoint.host} is used by a program that is not a store of elastic-agent: {problem}",
        f"stop that program (on {endpoint.host}, `ss -ltnp` shows it), or use another port in --rdzv-endpoint on all "
        "machines",
    )
