"""Which network interface an address belongs to."""

from __future__ import annotations

import ipaddress

import psutil


def interface_of(address: str) -> str | None:
    """The interface that has this address, or None: a loopback one, or a name, or not this machine's.

    Gloo, left alone, binds to whatever the machine's own name resolves to, which on many machines is
    127.0.1.1: then no other machine can reach it. The agent knows better, because the other agents reach
    this address.
    """
    try:
        wanted = ipaddress.ip_address(address.partition("%")[0])
    except ValueError:
        return None
    if wanted.is_loopback:
        return None
    for name, entries in psutil.net_if_addrs().items():
        for entry in entries:
            try:
                if ipaddress.ip_address(entry.address.partition("%")[0]) == wanted:
                    return name
            except ValueError:
                continue  # a hardware address
    return None
