"""Checks of this machine's endpoint and script, for the start of a run and for ``elastic-agent doctor``."""

from __future__ import annotations

import ast
import ipaddress
import os
import socket
from collections.abc import Iterator

import psutil
from msgspec import Struct

from elastic_agent.agent.environment_changes import EnvironmentChange, changes_of, is_environ
from elastic_agent.printable import one_line
from elastic_agent.python_source import parsed
from elastic_agent.transport import UnreachableError, is_loopback_name, resolve
from elastic_agent.values import Endpoint

_LONGEST = 500
LOOPBACK = "loopback-endpoint"
"""The check that cannot know whether all agents run on one machine."""


class Finding(Struct, frozen=True):
    """A problem of one machine. Cause and remedy are clauses without a full stop."""

    is_error: bool
    """The run will not start, or will hang or fail; else it may fail, be slow, or be misleading."""
    check: str
    """The check that found it, such as ``endpoint-name``; stable, for programs."""
    cause: str
    remedy: str
    machine: str = ""
    """The machine that has the problem; empty: the one that was examined."""


def error(check: str, cause: str, remedy: str, machine: str = "") -> Finding:
    """Return an error, with texts in one line."""
    return Finding(True, check, one_line(cause, _LONGEST), one_line(remedy, _LONGEST), machine)


def warning(check: str, cause: str, remedy: str, machine: str = "") -> Finding:
    """Return a warning, with texts in one line."""
    return Finding(False, check, one_line(cause, _LONGEST), one_line(remedy, _LONGEST), machine)


# -- the endpoint ---------------------------------------------------------------------------------


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


def other_addresses() -> list[str]:
    """Return the addresses at which other machines could reach this one."""
    every = [ipaddress.ip_address(address) for addresses in interfaces().values() for address in addresses]
    return [str(address) for address in every if not (address.is_loopback or address.is_link_local)]


def check_endpoint(endpoint: Endpoint) -> Iterator[Finding]:
    """Check that the endpoint's name means the same machine everywhere, and resolves here."""
    for member in endpoint.members:
        host = member.host
        if is_loopback_name(host):
            own = other_addresses()
            hint = f" (this machine's: {', '.join(own[:3])})" if own else ""
            yield error(
                LOOPBACK,
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
        if all(map(is_loopback_name, found)) and not _is_own_name(host):
            yield error(
                LOOPBACK,
                f"the endpoint's name {host} resolves to {found[0]} on this machine, although it is not its name",
                f"remove {host} from the line of {found[0]} in /etc/hosts",
            )


def _is_own_name(host: str) -> bool:
    own = os.uname().nodename.lower().partition(".")[0]
    return host.lower().partition(".")[0] == own


# -- the script -----------------------------------------------------------------------------------


def check_addresses(source: bytes, name: str) -> Iterator[Finding]:
    """Check that the script leaves the address of the process group to the agent."""
    for change in _set_addresses(parsed(source)):
        is_loopback = change.value in ("localhost", "127.0.0.1", "::1")
        make = error if is_loopback else warning
        why = (
            "so every machine waits for itself" if is_loopback else "which the agent sets for each generation"
        )
        shown = f"{change.name}={change.value}" if change.value else change.name
        yield make(
            "script-master-address",
            f"{name}:{change.line} sets {shown}, {why}",
            "remove that line, or use os.environ.setdefault",
        )


def _set_addresses(tree: ast.AST) -> Iterator[EnvironmentChange]:
    """Yield each place where MASTER_ADDR or MASTER_PORT is set.

    What an ``if`` guards by what is in the environment is left out. Without recursion: source may be nested deeply.
    """
    pending = [tree]
    while pending:
        node = pending.pop()
        if isinstance(node, ast.If) and any(map(is_environ, ast.walk(node.test))):
            continue
        for change in changes_of(node):
            if change.name in ("MASTER_ADDR", "MASTER_PORT") and not (change.if_missing or change.removed):
                yield change
        pending += reversed([*ast.iter_child_nodes(node)])
