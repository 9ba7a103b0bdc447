"""The store over which a generation's workers meet, and the port it is on."""

from __future__ import annotations

import socket

import pytest

from elastic_agent.protocol.records import Address
from elastic_agent.transport.base import TransportError
from elastic_agent.transport.c10d import BootstrapStore, PortPicker, check_store
from elastic_agent.values import Endpoint
from tests.loop_thread import in_loop
from tests.ports import free_ports

from .support import PATIENCE_S


class Clock:
    now_s = 1000.0

    def __call__(self) -> float:
        return self.now_s


def take(picker: PortPicker) -> int:
    """Return a port that was bound, and is free again at once as far as the system is concerned."""
    with picker.listen("127.0.0.1") as sock:
        return int(sock.getsockname()[1])


def check(address: Address, timeout_s: float) -> None:
    in_loop(check_store(Endpoint(address.host, address.port), timeout_s))


def test_a_port_of_the_range_is_not_reused_for_a_while() -> None:
    ports, clock = free_ports(2), Clock()
    picker = PortPicker(ports, 12.0, clock)
    first, second = take(picker), take(picker)
    assert {first, second} == {*ports}
    clock.now_s += 10_000.0
    with pytest.raises(TransportError):
        take(picker)  # both are still in use
    picker.released(first)
    clock.now_s += 11.9
    with pytest.raises(TransportError, match=r"1 in use, 1 not reused until 12 s after use, 0 held by other"):
        take(picker)
    clock.now_s += 0.2
    assert take(picker) == first


def test_a_port_of_another_program_is_skipped() -> None:
    ports = free_ports(2)
    with socket.create_server(("127.0.0.1", ports[0])):
        picker = PortPicker(ports, 12.0)
        assert take(picker) == ports[1]
        with pytest.raises(TransportError) as caught:
            take(picker)
    assert f"{ports[0]}:{ports[1]}" in str(caught.value)
    assert "1 in use, 0 not reused until 12 s after use, 1 held by other programs" in str(caught.value)
    assert "widen port_range" in str(caught.value)
    assert "\n" not in str(caught.value)


def test_without_a_range_no_recent_port_is_reused() -> None:
    picker = PortPicker(None, 12.0)
    taken = [take(picker) for _ in range(50)]
    assert len(set(taken)) == 50


def test_a_closed_store_does_not_answer_and_its_port_is_not_reused_unless_it_was_local() -> None:
    ports, clock = free_ports(1), Clock()
    picker = PortPicker(ports, 12.0, clock)
    for _ in range(3):
        store = BootstrapStore.open("127.0.0.1", picker)
        store.rests = False
        store.close()
    BootstrapStore.open("127.0.0.1", picker).close()
    with pytest.raises(TransportError, match="refused") as caught:
        check(store.address, PATIENCE_S)
    assert str(store.address) in str(caught.value)
    with pytest.raises(TransportError):
        BootstrapStore.open("127.0.0.1", picker)
    clock.now_s += 12.1
    BootstrapStore.open("127.0.0.1", picker).close()
