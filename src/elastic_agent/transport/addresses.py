"""Host names and addresses: which machine they belong to, how they are reached, and sockets on them."""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
from collections.abc import Iterator, Mapping, Sequence
from ipaddress import IPv4Address, IPv6Address
from pathlib import Path

from .base import Obstacle, UnreachableError

Address = tuple[int, str]
"""An address family and a numeric address (with scope for link-local IPv6)."""


BACKLOG = 4096
KEEPALIVE_S = 60
KEEPALIVES_MISSED = 10
"""The number in a row that ends a connection: an interruption of a few minutes does not."""

LOOPBACK_DOWN = "the loopback interface of this machine is down (as root: ip link set lo up)"

_LOOPBACK_NAMES = ("localhost", "localhost.localdomain", "localhost6", "ip6-localhost", "ip6-loopback")


def resolve(host: str) -> list[Address]:
    """Return every address of a host, IPv4 and IPv6, in the resolver's order.

    Raises:
        UnreachableError: the name is not known here.
    """
    try:
        found = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror as error:
        raise UnreachableError(
            f"the host name {host} does not resolve on this machine ({error.strerror})",
            Obstacle.UNKNOWN_NAME,
            "give an address, or a name that resolves on every machine",
        ) from None
    except OSError as error:  # no descriptor is left to read the resolver's files with
        problem = f"cannot look up the host name {host} ({error.strerror})"
        raise UnreachableError(problem, Obstacle.EXPLAINED) from None
    except UnicodeError:
        raise UnreachableError(
            f"{host!r} is not a host name", remedy="give an address, or a name that resolves"
        ) from None
    known = [(int(family), str(sockaddr[0])) for family, _, _, _, sockaddr in found]
    return [address for address in dict.fromkeys(known) if address[0] in (socket.AF_INET, socket.AF_INET6)]


def is_loopback_name(host: str) -> bool:
    """Return whether the endpoint is *named* as loopback: it is then a different machine on each machine.

    A machine's own name that resolves to 127.0.1.1 on that machine (Debian's /etc/hosts) does not: other machines
    resolve it to a real address.
    """
    if host.rstrip(".").lower() in _LOOPBACK_NAMES:
        return True
    with contextlib.suppress(ValueError):
        return ipaddress.ip_address(host).is_loopback
    return False


def is_local(addresses: Sequence[Address]) -> bool:
    """Return whether one of the addresses is this machine's."""
    return any(_is_own(family, address) for family, address in addresses)


def _is_own(family: int, address: str) -> bool:
    """Return whether it can be bound; where all addresses can, whether packets to it leave from it."""
    with contextlib.suppress(OSError):
        with socket.socket(family, socket.SOCK_STREAM) as stream:
            stream.bind((address, 0))
        plain = ipaddress.ip_address(address.partition("%")[0])
        if plain.is_loopback or plain.is_unspecified or not _binds_anything(family):
            return True
        return source_towards(family, address) == address
    return False


def source_towards(family: int, address: str) -> str:
    """Return this machine's address on the route to another one; nothing is sent.

    Raises:
        OSError: there is no route.
    """
    with socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, 9))
        return str(probe.getsockname()[0])


def _binds_anything(family: int) -> bool:
    """Return whether ``ip_nonlocal_bind`` is set, as it is where failover addresses move between machines."""
    version = "ipv6" if family == socket.AF_INET6 else "ipv4"
    with contextlib.suppress(OSError):
        return Path(f"/proc/sys/net/{version}/ip_nonlocal_bind").read_text().strip() == "1"
    return False


def listen(host: str, port: int) -> socket.socket:
    """Return a listening socket for ``host``, on no more interfaces than necessary (see :func:`_to_listen_at`).

    Raises:
        OSError: the port is taken (EADDRINUSE) or may not be used.
    """
    failure: OSError | None = None
    for family, address in _to_listen_at(host):
        sock = socket.socket(family, socket.SOCK_STREAM)
        try:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if address == "::":
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 0)
            sock.bind((address, port))
            sock.listen(BACKLOG)
        except OSError as error:
            sock.close()
            if error.errno == errno.EADDRINUSE:
                raise
            failure = error
        else:
            return sock
    raise failure or OSError(errno.EADDRNOTAVAIL, f"cannot listen on any address of {host}")


def _to_listen_at(host: str) -> list[Address]:
    """Return where to listen for ``host``: at its only address, if that is this machine's; else everywhere.

    Everywhere too for a name that means loopback here and not elsewhere (Debian's 127.0.1.1), for an address that is
    translated on the way to this machine, and for a link-local one, which torch's store cannot dial.
    """
    if is_loopback_name(host):
        return resolve(host)
    everywhere: list[Address] = [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")]
    try:
        found = resolve(host)
    except UnreachableError:
        return everywhere
    family, address = found[0] if len(found) == 1 else (0, "%")
    if "%" in address or not _is_own(family, address):
        return everywhere
    plain = ipaddress.ip_address(address)
    return everywhere if plain.is_loopback or plain.is_unspecified else found


def connect(host: str, port: int, timeout_s: float) -> socket.socket:
    """Return a connection to the first address of the host that takes one.

    Raises:
        UnreachableError: none does; the message is one line.
    """
    addresses = resolve(host)
    failures: dict[Address, OSError] = {}
    for family, address in addresses:
        try:
            return _connect_to(family, address, port, max(0.1, timeout_s / len(addresses)))
        except OSError as error:
            failures[family, address] = error
    raise _unreachable(failures, timeout_s)


def _unreachable(failures: Mapping[Address, OSError], timeout_s: float) -> UnreachableError:
    problems: list[str] = []
    obstacles: set[Obstacle] = set()
    for (family, address), error in failures.items():
        own = own_network_problem(family, address) if _is_silence(error) else ""
        problem, obstacle = (own, Obstacle.OWN_NETWORK) if own else _explain(error, timeout_s)
        problems.append(f"{address}: {problem}")
        obstacles.add(obstacle)
    if len(obstacles) > 1:  # an address of a family that this machine does not have
        obstacles.discard(Obstacle.OWN_NETWORK)
    return UnreachableError("; ".join(problems), obstacles.pop() if len(obstacles) == 1 else Obstacle.OTHER)


def _is_silence(error: OSError) -> bool:
    """Return whether no packet came back from the other machine."""
    return isinstance(error, TimeoutError) or error.errno in (errno.ENETUNREACH, errno.EHOSTUNREACH)


def own_network_problem(family: int, address: str) -> str:
    """Return what keeps packets to the address from leaving this machine; empty: nothing that is known here."""
    try:
        import psutil  # few of those that import this module need it

        source = source_towards(family, address)
        name = (interface_of(source) or "").partition(":")[0]  # without the label of an address
        known = psutil.net_if_stats().get(name)
        if source == address or known is None or known.isup:
            return ""
    except OSError as error:
        if error.errno != errno.ENETUNREACH:
            return ""
        if is_loopback_name(address) and loopback_is_down():
            return LOOPBACK_DOWN
        return "no route to the network (an interface of this machine is down, or has no route: ip link, ip route)"
    return f"{name} of this machine has no link (cable or switch: ip link)"


def loopback_is_down() -> bool:
    """Return whether this machine has a loopback interface that is down, as in a network namespace that is new."""
    import psutil  # few of those that import this module need it

    try:
        known = psutil.net_if_stats().get("lo")  # unlike /sys, it shows this process's network namespace
    except OSError:
        return False
    return known is not None and not known.isup


def _connect_to(family: int, address: str, port: int, timeout_s: float) -> socket.socket:
    sock = socket.socket(family, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect((address, port))
        _refuse_itself(sock)
    except OSError:
        sock.close()
        raise
    return sock


def _refuse_itself(sock: socket.socket) -> None:
    """Raise ConnectionRefusedError if the system gave this client the port that it dialled."""
    if sock.getsockname() == sock.getpeername():
        raise ConnectionRefusedError(errno.ECONNREFUSED, "")


def set_up_for_messages(sock: socket.socket) -> None:
    """Send at once, and while there is nothing to send, let firewalls see that the connection is used.

    Raises:
        OSError: the connection is gone.
    """
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPCNT, KEEPALIVES_MISSED)


def _explain(error: OSError, timeout_s: float) -> tuple[str, Obstacle]:
    """Return what kept a connection from being made, in words and as callers need to know it."""
    if isinstance(error, TimeoutError):
        return (
            f"no answer within {timeout_s:g} s (a firewall drops packets, or the machine is down)",
            Obstacle.NO_ANSWER,
        )
    no_family = "this machine has no address of that family", Obstacle.OWN_NETWORK
    known = {
        errno.ECONNREFUSED: ("connection refused (nothing is listening there yet)", Obstacle.REFUSED),
        errno.EHOSTUNREACH: ("the host is unreachable (down, or behind a firewall)", Obstacle.UNREACHABLE),
        errno.EADDRNOTAVAIL: no_family,
        errno.EAFNOSUPPORT: no_family,
        errno.EMFILE: (
            "this process has too many open files to open a socket; raise ulimit -n",
            Obstacle.EXPLAINED,
        ),
        errno.ENFILE: ("this machine has too many open files to open a socket", Obstacle.EXPLAINED),
    }
    return known.get(error.errno or 0, (error.strerror or str(error), Obstacle.OTHER))


def local_address_towards(host: str, own: str) -> str:
    """Return the address ``own`` of this machine on a connection to ``host``, as other nodes can dial it.

    On the host of the store itself that connection may run over loopback although the endpoint is not named so;
    then it is the address under which the machine reaches the outside.
    """
    address = _plain(own)
    if is_loopback_name(host) or not ipaddress.ip_address(address.partition("%")[0]).is_loopback:
        return address
    for family, target in ((socket.AF_INET, "192.0.2.1"), (socket.AF_INET6, "2001:db8::1")):
        with contextlib.suppress(OSError):
            return _plain(source_towards(family, target))
    others = (str(own_address) for _, own_address in _interface_addresses() if own_address.version == 4)
    return next(others, address)  # for machines that have no way to the outside


def _interface_addresses() -> Iterator[tuple[str, IPv4Address | IPv6Address]]:
    """Return the interfaces other than loopback, with each of their addresses."""
    import psutil  # few of those that import this module need it

    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            with contextlib.suppress(ValueError):  # a hardware address
                address = ipaddress.ip_address(entry.address.partition("%")[0])
                if not address.is_loopback:
                    yield name, address


def own_addresses() -> list[str]:
    """Return addresses of this machine that others can dial, without those that count on one network segment only."""
    found = (address for _, address in _interface_addresses() if not address.is_link_local)
    return list(dict.fromkeys(map(str, found)))


def _plain(address: str) -> str:
    """Return an IPv4 address as such where a dual-stack socket shows it mapped into IPv6."""
    return address.removeprefix("::ffff:") if address.count(".") == 3 else address


def interface_of(address: str) -> str | None:
    """Return the interface that has this address, or None: a loopback one, or a name, or not this machine's.

    Gloo by default binds to the address that the machine's own name resolves to, which on many machines is
    127.0.1.1: then no other machine can reach it. The agent has a better address: the one that the other agents
    reach.
    """
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    return next((name for name, address in _interface_addresses() if address == wanted), None)
