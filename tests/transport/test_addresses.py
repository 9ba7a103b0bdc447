"""Whose an address is, and how a machine is reached."""

from __future__ import annotations

import json
import socket
from pathlib import Path

import pytest

from elastic_agent.transport.addresses import (
    connect,
    is_loopback_name,
    listen,
    resolve,
)
from elastic_agent.transport.base import UnreachableError
from tests.processes import no_descriptors_left

from .support import PATIENCE_S, in_a_namespace, needs_namespaces


def has_ipv6() -> bool:
    try:
        socket.create_server(("::1", 0), family=socket.AF_INET6).close()
    except OSError:
        return False
    return True


needs_ipv6 = pytest.mark.skipif(not has_ipv6(), reason="this machine has no IPv6")
LOOPBACK_HOSTS = ("127.0.0.1", "[::1]") if has_ipv6() else ("127.0.0.1",)


def test_a_process_without_descriptors_reports_an_unreachable_endpoint() -> None:
    resolve("127.0.0.1")  # Python reads a module of its own for the first one
    with pytest.raises(UnreachableError) as caught, no_descriptors_left():
        connect("127.0.0.1", 1, 1.0)
    assert str(caught.value) == (
        "127.0.0.1: this process has too many open files to open a socket; raise ulimit -n"
    )


LOOPBACK = ["localhost", "LocalHost.", "ip6-localhost", "127.0.0.1", "127.0.1.1", "127.9.9.9", "::1"]
NOT_LOOPBACK = ["node1", "localhost.example.org", "10.0.0.1", "1.127.0.0", "0.0.0.0", "::", "fe80::1"]


@pytest.mark.parametrize("host", [*LOOPBACK, *NOT_LOOPBACK])
def test_loopback_endpoints_are_recognised(host: str) -> None:
    assert is_loopback_name(host) is (host in LOOPBACK)


@pytest.mark.parametrize("address", ["127.0.1.1", "127.0.0.1", pytest.param("::1", marks=needs_ipv6)])
def test_a_host_name_that_resolves_to_loopback_is_served_on_all_interfaces(address: str) -> None:
    """Debian's /etc/hosts gives a machine's own name the address 127.0.1.1: only on that machine."""
    with listen("node1", 0) as sock:
        assert sock.getsockname()[0] in ("::", "0.0.0.0")
        connect(address, int(sock.getsockname()[1]), PATIENCE_S).close()


@pytest.mark.parametrize("host", ["127.0.0.1", "127.0.0.9", pytest.param("::1", marks=needs_ipv6)])
def test_a_loopback_endpoint_is_served_on_loopback_only(host: str) -> None:
    with listen(host, 0) as sock:
        assert sock.getsockname()[0] == host


def test_every_address_of_a_name_is_tried() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = int(server.getsockname()[1])
        with connect("localhost", port, PATIENCE_S) as sock:
            assert sock.getpeername() == ("127.0.0.1", port)


@pytest.mark.parametrize("host", ["a..b", "x" * 80])
def test_an_invalid_host_name_is_reported_as_such(host: str) -> None:
    with pytest.raises(UnreachableError) as caught:
        resolve(host)
    assert host in str(caught.value)
    assert "\n" not in str(caught.value)


# One machine with an interface of its own and no way out, as compute nodes often are.
WITHOUT_A_ROUTE = """
set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
ip addr add 10.9.8.7/24 dev eth0
ip addr add 10.9.8.6/24 dev eth0
ip link set eth0 up
ip link set eth1 up
exec "$0" -c '
import json, socket
from pathlib import Path
from elastic_agent.transport.addresses import connect, is_local, listen, local_address_towards
addresses = ["10.9.8.7", "10.9.8.6", "127.0.1.1", "10.9.8.8", "192.0.2.1"]
local = lambda: [is_local([(int(socket.AF_INET), address)]) for address in addresses]
facts = {"local": local()}
Path("/proc/sys/net/ipv6/bindv6only").write_text("1")
with listen("node1", 0) as server:
    port = server.getsockname()[1]
    facts["advertised"] = [
        local_address_towards("node1", connect(address, port, 5.0).getsockname()[0])
        for address in ("127.0.1.1", "10.9.8.7")
    ]
Path("/proc/sys/net/ipv4/ip_nonlocal_bind").write_text("1")
facts["local though all can be bound"] = local()
print(json.dumps(facts))
'
"""


@pytest.mark.prove
@needs_namespaces
def test_a_machine_without_a_route_finds_its_own_addresses() -> None:
    facts = json.loads(in_a_namespace(WITHOUT_A_ROUTE))
    assert facts["local"] == [True, True, True, False, False]
    assert facts["advertised"] == ["10.9.8.7", "10.9.8.7"]
    assert facts["local though all can be bound"][2:] == [True, False, False]
    assert facts["local though all can be bound"][0]


# A machine with eth0, whose cable can be pulled (eth1 is its other end), and a loopback interface that is down.
WITH_A_NETWORK_THAT_FAILS = """
set -e
ip link add eth0 type veth peer name eth1
ip addr add 10.9.8.7/24 dev eth0 label eth0:1
ip link set eth0 up
ip link set eth1 up
tell() { "$0" -c '
import sys
from elastic_agent.transport.addresses import connect
from elastic_agent.transport.base import UnreachableError
try:
    connect(sys.argv[1], 1, 0.1)
except UnreachableError as error:
    print(error.obstacle.name, error)
' $1; }
tell 127.0.0.1
ip link set lo up
tell 127.0.0.1
tell 192.0.2.1
tell 10.9.8.1
ip link set eth1 down
tell 10.9.8.1
ip link set eth0 down
tell 10.9.8.1
"""


@pytest.mark.prove
@needs_namespaces
def test_a_machine_whose_own_network_fails_says_so() -> None:
    said = in_a_namespace(WITH_A_NETWORK_THAT_FAILS).splitlines()
    no_loopback, refused, elsewhere, silent, unplugged, down = said
    assert no_loopback.endswith("the loopback interface of this machine is down (as root: ip link set lo up)")
    assert refused.startswith("REFUSED ")
    assert "no route to the network (an interface of this machine is down" in elsewhere
    assert silent.startswith("NO_ANSWER ")
    assert unplugged.endswith("eth0 of this machine has no link (cable or switch: ip link)")
    assert "no route to the network (an interface of this machine is down" in down
    assert {line.split()[0] for line in (no_loopback, elsewhere, unplugged, down)} == {"OWN_NETWORK"}


# A machine with two addresses and one of IPv6; some names of it in its own /etc/hosts.
WITH_SEVERAL_ADDRESSES = """
set -e
ip link set lo up
ip link add eth0 type veth peer name eth1
ip addr add 10.9.8.7/24 dev eth0
ip addr add 10.9.8.6/24 dev eth0
ip addr add fd00::7/64 dev eth0 nodad
ip link set eth0 up
ip link set eth1 up
printf '127.0.0.1 localhost\\n10.9.8.7 one\\n10.9.8.7 two\\n10.9.8.6 two\\n127.0.1.1 debian\\n' > "$1"
mount --bind "$1" /etc/hosts
exec "$0" -c '
import asyncio
import json
from elastic_agent.protocol.records import RECORD_VERSION, Lease, Member, Policy, State
from elastic_agent.transport import c10d
from elastic_agent.transport.addresses import connect, listen
from elastic_agent.transport.base import UnreachableError
from elastic_agent.transport.c10d import BootstrapStore, PortPicker
from elastic_agent.values import Endpoint

def answers(port):
    found = []
    for address in ("10.9.8.7", "10.9.8.6", "127.0.0.1", "fd00::7", "::1"):
        try:
            connect(address, port, 5.0).close()
        except UnreachableError:
            continue
        found.append(address)
    return found

facts = {"reached": {}, "met": [], "bootstrap": {}}
for host in ("10.9.8.7", "fd00::7", "one", "two", "debian", "0.0.0.0", "192.0.2.1", "127.0.0.1"):
    with listen(host, 0) as sock:
        facts["reached"][host] = answers(sock.getsockname()[1])

async def meet(host):
    store = await c10d.find_or_host(Endpoint(host, 0), 5.0)
    node = await c10d.dial(Endpoint(host, store.port), "run", 5.0)
    member = Member(RECORD_VERSION, "a", "a-1", node.local_address, 1, State.READY, 0, Policy())
    await node.register(member, Lease("a-1", 5.0))
    reports = await c10d.dial_reports(Endpoint(host, store.port), "run", 5.0)
    assert list((await reports.read_run()).snapshot.members) == ["a-1"]
    facts["met"].append(host)
    offer = BootstrapStore.open(node.local_address, PortPicker(None, 0.0))
    await c10d.check_store(Endpoint(offer.address.host, offer.address.port), 5.0)
    facts["bootstrap"][node.local_address] = answers(offer.address.port)
    offer.close()
    store.close()

for host in ("10.9.8.7", "fd00::7", "one", "two", "debian", "localhost"):
    asyncio.run(meet(host))
print(json.dumps(facts), flush=True)
import os
os._exit(0)
'
"""


@pytest.mark.prove
@needs_namespaces
def test_a_store_listens_only_on_the_address_of_its_endpoint(tmp_path: Path) -> None:
    facts = json.loads(in_a_namespace(WITH_SEVERAL_ADDRESSES, str(tmp_path / "hosts")))
    everywhere = ["10.9.8.7", "10.9.8.6", "127.0.0.1", "fd00::7", "::1"]
    assert facts["reached"] == {
        "10.9.8.7": ["10.9.8.7"],
        "fd00::7": ["fd00::7"],
        "one": ["10.9.8.7"],
        "two": everywhere,
        "debian": everywhere,
        "0.0.0.0": everywhere,
        "192.0.2.1": everywhere,  # translated on the way here
        "127.0.0.1": ["127.0.0.1"],
    }
    assert facts["met"] == ["10.9.8.7", "fd00::7", "one", "two", "debian", "localhost"]
    assert facts["bootstrap"]["10.9.8.7"] == ["10.9.8.7"]
    assert facts["bootstrap"]["fd00::7"] == ["fd00::7"]
