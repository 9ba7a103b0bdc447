"""The handler that stock torchrun calls, with the node that takes part in the run in a thread beside it."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
from torch.distributed.elastic.rendezvous import (
    RendezvousConnectionError,
    RendezvousInfo,
    RendezvousParameters,
)

from elastic_agent.torchrun.handler import ElasticRendezvous
from elastic_agent.torchrun.plugin import elastic_handler
from elastic_agent.transport.c10d import BootstrapStore, StoreServers
from tests.ports import free_port
from tests.transport.support import program, says
from tests.waiting import wait_for


@contextmanager
def handlers(
    count: int, state_dir: Path, monkeypatch: pytest.MonkeyPatch, port: int = 0, **conf: str
) -> Iterator[list[ElasticRendezvous]]:
    """The handlers of so many torchruns, which form one world."""
    monkeypatch.setenv("XDG_STATE_HOME", str(state_dir))
    params = RendezvousParameters(
        "elastic",
        f"127.0.0.1:{port or free_port()}",
        "job",
        count,
        count,
        settle="0.1",
        lease_ttl="60",
        **conf,
    )
    made = [elastic_handler()(params) for _ in range(count)]
    try:
        yield [handler for handler in made if isinstance(handler, ElasticRendezvous)]
    finally:
        with ThreadPoolExecutor(count) as threads:
            list(threads.map(lambda handler: handler.set_closed() or handler.shutdown(), made))


def test_news_of_the_last_world_that_was_not_read_does_not_end_the_next_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """torchrun asks whether its world is over only while its workers are healthy."""
    with handlers(2, tmp_path, monkeypatch) as (a, b), ThreadPoolExecutor(2) as threads:
        first = [threads.submit(handler.next_rendezvous) for handler in (a, b)]
        assert {future.result().rank for future in first} == {0, 1}

        of_b = threads.submit(b.next_rendezvous)  # its workers failed
        wait_for("a's torchrun is told that the world is over", lambda: a.num_nodes_waiting() > 0)
        of_a = threads.submit(a.next_rendezvous)  # its workers failed as well
        second: list[RendezvousInfo] = [of_a.result(), of_b.result()]

        assert {info.rank for info in second} == {0, 1}
        assert [a.num_nodes_waiting(), b.num_nodes_waiting()] == [0, 0]


def test_the_thread_leaves_no_connection_open(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The bootstrap store of another node outlasts it."""
    left: list[Callable[[], None]] = []
    for kind in (BootstrapStore, StoreServers):
        monkeypatch.setattr(
            kind, "close", lambda opened, close=kind.close: left.append(partial(close, opened))
        )
    gc.collect()
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", ResourceWarning)
        with handlers(1, tmp_path, monkeypatch) as made:
            made.pop().next_rendezvous()
        for _ in range(3):  # a connection goes after its user
            gc.collect()
    for close in left:
        close()
    assert [str(warning.message) for warning in caught if warning.category is ResourceWarning] == []


def test_bootstrap_stores_are_on_the_ports_of_rdzv_conf(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    port = free_port()
    with handlers(1, tmp_path, monkeypatch, port_range=f"{port}:{port}", start_timeout="70") as (handler,):
        assert handler._node.policy.start_timeout_s == 70.0
        assert handler.next_rendezvous().bootstrap_store_info.master_port == port


def test_a_port_of_another_program_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (
        program(says(b"SSH-2.0-something\r\n", first=True)) as endpoint,
        handlers(1, tmp_path, monkeypatch, endpoint.port) as (handler,),
        pytest.raises(RendezvousConnectionError, match="is used by another program"),
    ):
        handler.next_rendezvous()


def test_an_internal_error_is_logged_and_ends_the_rendezvous(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError

    with handlers(1, tmp_path, monkeypatch) as (handler,):
        assert handler.next_rendezvous().rank == 0
        monkeypatch.setattr(handler._node._participant, "take_in", fail)
        for _ in range(2):
            with pytest.raises(RendezvousConnectionError, match="ended unexpectedly; see its message above"):
                handler.next_rendezvous()
        assert handler.num_nodes_waiting() > 0
    assert "internal error of the rendezvous for torchrun" in capfd.readouterr().err
