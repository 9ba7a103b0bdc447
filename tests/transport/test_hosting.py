"""Finding the store at an endpoint, or hosting it, and saying clearly why not."""

from __future__ import annotations

import resource
import socket
from pathlib import Path

import pytest

from elastic_agent.transport import c10d
from elastic_agent.transport.base import (
    NotAStoreError,
    Obstacle,
    StoreLostError,
    TransportError,
    UnreachableError,
)
from elastic_agent.transport.c10d import dialling, host
from elastic_agent.values import Endpoint
from tests.loop_thread import Blocking, in_loop

from .support import (
    PATIENCE_S,
    C10dScene,
    beside,
    free_endpoint,
    member,
    peers,
    program,
    says,
    torchs_server,
)
from .test_addresses import needs_ipv6

SILENT_S = 0.5
"""After which time what never answers is given up."""


def why_not(endpoint: Endpoint, timeout_s: float = PATIENCE_S) -> TransportError:
    """Return the error of a dial."""
    with pytest.raises(TransportError) as caught:
        in_loop(c10d.dial(endpoint, "run", timeout_s))
    assert "\n" not in str(caught.value)
    return caught.value


PROGRAMS = {
    "web server": (
        says(b"HTTP/1.1 400 Bad Request\r\nContent-Length: 0\r\n\r\n"),
        NotAStoreError,
        ["another port"],
    ),
    "ssh server": (says(b"SSH-2.0-OpenSSH_9.2\r\n", first=True), NotAStoreError, ["SSH"]),
    # A host that dies while it accepts does that too, so dialling goes on.
    "it closes": (lambda sock: None, UnreachableError, ["closed the connection without an answer"]),
    "it is silent": (
        says(b""),
        UnreachableError,
        [
            "accepts connections but did not answer within 0.5 s",
            "or another program listens there: `ss -ltnp` on that machine",
        ],
    ),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_another_program_at_the_endpoint_is_recognised(name: str) -> None:
    talk, kind, words = PROGRAMS[name]
    with program(talk) as endpoint:
        error = why_not(endpoint, SILENT_S if "silent" in name else PATIENCE_S)
    assert isinstance(error, kind)
    assert all(part in str(error) for part in (str(endpoint), *words))
    assert not isinstance(error, UnreachableError) or (error.obstacle is Obstacle.SILENT) is (
        "silent" in name
    )


def test_a_torchrun_store_at_the_endpoint_is_recognised(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dialling, "BIRTH_S", 0.1)
    theirs = torchs_server()
    theirs.set("torch.rendezvous.none", "state")
    error = why_not(Endpoint("127.0.0.1", theirs.port))
    assert isinstance(error, NotAStoreError)
    assert "torchrun" in str(error)


def test_an_endpoint_elsewhere_is_not_hosted_here(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "is_local", lambda _: False)
    with pytest.raises(UnreachableError, match=r"127\.0\.0\.1: connection refused"):
        in_loop(c10d.find_or_host(free_endpoint(), PATIENCE_S))


def test_a_bound_port_that_does_not_answer_is_reported() -> None:
    with socket.socket() as held:
        held.bind(("127.0.0.1", 0))
        with pytest.raises(
            NotAStoreError, match="no store answers there; use another port, or stop what `ss -ltnp` shows"
        ):
            in_loop(c10d.find_or_host(Endpoint("127.0.0.1", held.getsockname()[1]), PATIENCE_S))


def test_another_program_on_the_port_is_not_taken_for_a_host() -> None:
    with program(says(b"220 mail ready\r\n", first=True)) as endpoint:
        assert in_loop(c10d.find_or_host(endpoint, PATIENCE_S)) is None
        assert isinstance(why_not(endpoint), NotAStoreError)


@pytest.mark.parametrize(
    "address", ["127.0.0.9", "localhost", "0.0.0.0", pytest.param("::1", marks=needs_ipv6)]
)
def test_a_store_works_at_every_kind_of_address(address: str) -> None:
    scene = C10dScene(address)
    inbox = scene.inbox()
    node = scene.joined("a")
    assert inbox.wait(PATIENCE_S) == [("run", "a")]
    assert list(scene.coordinator().read(None).members) == ["a"]
    assert node.store_id.startswith(scene.host.store_id)
    scene.close()


def test_one_of_several_processes_hosts_and_another_takes_over_when_it_is_killed() -> None:
    endpoint = free_endpoint()
    with peers(4, endpoint) as all_peers:
        seen = set()
        while all_peers:
            for peer in all_peers:
                peer.ask()
            answers = [peer.hear() for peer in all_peers]
            hosts = [peer for peer, (hosting, _) in zip(all_peers, answers, strict=True) if hosting]
            stores = {store_id for _, store_id in answers}
            assert len(hosts) == 1
            assert len(stores) == 1, "all peers use the same store"
            assert not stores & seen, "and it is a new one each time"
            seen |= stores
            assert all_peers[0].elect()[1] in stores, "it stays while its host lives"
            hosts[0].kill()
            all_peers.remove(hosts[0])
        assert isinstance(why_not(endpoint), UnreachableError)


def test_a_frozen_host_blocks_neither_dialling_nor_closing() -> None:
    endpoint = free_endpoint()
    with peers(1, endpoint) as (peer,):
        hosting, store_id = peer.elect()
        assert hosting
        link, writer = (Blocking(in_loop(c10d.dial(endpoint, "run", PATIENCE_S))) for _ in range(2))
        peer.freeze()
        error = why_not(endpoint, SILENT_S)
        assert isinstance(error, UnreachableError)
        assert "frozen" in str(error)
        assert in_loop(c10d.find_or_host(endpoint, PATIENCE_S)) is None, (
            "its port is taken: no other process may host"
        )
        stuck, written = beside(link.read_plan), beside(lambda: writer.write(member("a")))
        with pytest.raises(TimeoutError):
            stuck.result(0.3)
        assert not written.done(), "it is not written before the store says so"
        link.close()
        with pytest.raises(StoreLostError, match="closed"):
            stuck.result(PATIENCE_S)
        peer.thaw()
        written.result(PATIENCE_S)
        again = Blocking(in_loop(c10d.dial(endpoint, "run", PATIENCE_S)))
        assert again.store_id.startswith(store_id)
        assert again.read_plan() is None


def test_a_store_whose_process_has_no_room_for_a_thread_names_the_limit_of_its_address_space() -> None:
    servers = c10d.StoreServers(None)
    try:
        servers.await_ready()
        assert servers.pid is not None
        pages = int(Path(f"/proc/{servers.pid}/statm").read_text().split()[0])
        size = pages * resource.getpagesize()
        resource.prlimit(servers.pid, resource.RLIMIT_AS, (size, size))
        with pytest.raises(StoreLostError) as caught:
            servers.serve(socket.create_server(("127.0.0.1", 0)), "127.0.0.1")
    finally:
        servers.close()
    limit = f"its address space is limited to {size // 10**6} MB: ulimit -v unlimited"
    assert str(caught.value) == f"Resource temporarily unavailable ({limit})"
