"""Machines of their own for nodes: network namespaces on a bridge."""

from __future__ import annotations

import os
import secrets
import shutil
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from elastic_agent.testing.processes import NodeProcess

from .cluster import Cluster

SUBNET = "10.213.77"


def ip(words: str) -> None:
    subprocess.run(["ip", *words.split()], check=True, capture_output=True, text=True)


class Machines:
    """One network namespace for each node, joined by a bridge in one more; cables can be pulled.

    The first one's address is the subnet's 1, and so on.
    """

    def __init__(self, nodes: tuple[str, ...]) -> None:
        self.names = nodes
        self._tag = f"ea{secrets.token_hex(3)}"

    def build(self) -> None:
        ip(f"netns add {self._tag}-net")
        ip(f"-n {self._tag}-net link add br0 type bridge")
        ip(f"-n {self._tag}-net link set br0 up")
        for number, node in enumerate(self.names, 1):
            ip(f"netns add {self._tag}-{node}")
            ip(f"-n {self._tag}-net link add port-{node} type veth peer name eth0 netns {self._tag}-{node}")
            ip(f"-n {self._tag}-net link set port-{node} master br0 up")
            ip(f"-n {self._tag}-{node} link set lo up")
            ip(f"-n {self._tag}-{node} addr add {SUBNET}.{number}/24 dev eth0")
            ip(f"-n {self._tag}-{node} link set eth0 up")

    def remove(self) -> None:
        """Removing a namespace removes its ends of the cables, and with one end the other."""
        for name in (*self.names, "net"):
            subprocess.run(["ip", "netns", "del", f"{self._tag}-{name}"], capture_output=True, check=False)

    def within(self, node: str) -> tuple[str, ...]:
        """The command that starts something on that machine."""
        return "ip", "netns", "exec", f"{self._tag}-{node}"

    def start(self, cluster: Cluster, node: str, slots: int = 1) -> NodeProcess:
        """Start an agent there."""
        return cluster.start(
            node, slots, state=f"state-{node}", within=self.within(node), GLOO_SOCKET_IFNAME="eth0"
        )

    def address(self, node: str) -> str:
        return f"{SUBNET}.{self.names.index(node) + 1}"

    def cut_off(self, node: str) -> None:
        ip(f"-n {self._tag}-net link set port-{node} down")

    def join(self, node: str) -> None:
        ip(f"-n {self._tag}-net link set port-{node} up")


@contextmanager
def built(*nodes: str) -> Iterator[Machines]:
    """Machines of these names, removed in the end; skips the test where there can be none."""
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    if shutil.which("ip") is None:
        pytest.skip("network namespaces need the ip command (Debian: iproute2)")
    machines = Machines(nodes)
    try:
        machines.build()
    except subprocess.CalledProcessError as error:
        machines.remove()
        pytest.skip(f"no network namespaces here: {error.stderr.strip()}")
    try:
        yield machines
    finally:
        machines.remove()
