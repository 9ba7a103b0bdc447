"""The nodes of a world agree, over its bootstrap store, whether all of them came."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic_agent.torchrun.barrier import Gathering
from elastic_agent.transport.base import StoreLostError, TransportError
from elastic_agent.transport.c10d.bootstrap import BootstrapStore, PortPicker
from tests.loop_thread import Blocking, in_loop

from .support import PATIENCE_S


@pytest.fixture
def store() -> Iterator[BootstrapStore]:
    opened = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
    yield opened
    opened.close()


def gathering(store: BootstrapStore, size: int, timeout_s: float = PATIENCE_S) -> Blocking:
    return Blocking(in_loop(Gathering.connect(store.address, size, timeout_s)))


def arrive(store: BootstrapStore, size: int) -> list[Blocking]:
    return [gathering(store, size) for _ in range(size)]


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [one.result(PATIENCE_S) for one in [pool.submit(call) for call in calls]]


def test_the_barrier_opens_when_the_last_node_joins(store: BootstrapStore) -> None:
    for size in (1, 5):
        another = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
        nodes = arrive(another, size)
        calls = [lambda one=one, rank=rank: one.come(rank, PATIENCE_S) for rank, one in enumerate(nodes)]
        assert together(*calls) == [True] * size
        another.close()


def test_a_node_that_cancels_cancels_for_all_also_late_ones(store: BootstrapStore) -> None:
    nodes = arrive(store, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes[0].come, 0, PATIENCE_S)
        gathering(store, 0).call_off()
        assert waiting.result(PATIENCE_S) is False
    assert nodes[1].come(1, PATIENCE_S) is False
    assert nodes[2].come(2, PATIENCE_S) is False, "it completes the list, but it is decided already"


def test_a_complete_barrier_cannot_be_cancelled(store: BootstrapStore) -> None:
    nodes = arrive(store, 2)
    assert together(lambda: nodes[0].come(0, PATIENCE_S), lambda: nodes[1].come(1, PATIENCE_S)) == [
        True,
        True,
    ]
    nodes[0].call_off()
    assert nodes[1].come(1, PATIENCE_S) is True


def test_a_race_of_the_last_node_and_a_cancel_has_one_result_for_all() -> None:
    outcomes = set()
    for _ in range(40):
        store = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
        nodes = arrive(store, 2)
        stranger = gathering(store, 0)
        *heard, _ = together(
            lambda nodes=nodes: nodes[0].come(0, PATIENCE_S),
            lambda nodes=nodes: nodes[1].come(1, PATIENCE_S),
            stranger.call_off,
        )
        assert len(set(heard)) == 1
        outcomes.add(heard[0])
        store.close()
    assert outcomes, "either may win, but the result is the same for all"


def test_a_node_cancels_at_its_timeout(store: BootstrapStore) -> None:
    first, second = arrive(store, 2)
    assert first.come(0, 0.05) is False
    assert second.come(1, PATIENCE_S) is False


def test_the_host_detects_when_no_node_needs_the_store(store: BootstrapStore) -> None:
    nodes = arrive(store, 2)
    nodes[0].go(0)
    assert nodes[0].see_all_gone(0.05) is False
    nodes[1].go(1)
    assert nodes[0].see_all_gone(PATIENCE_S) is True


def test_a_lost_store_is_an_error_at_the_barrier(store: BootstrapStore) -> None:
    (node, _) = arrive(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.come, 0, 10 * PATIENCE_S)
        store.close()
        with pytest.raises(StoreLostError):
            waiting.result(PATIENCE_S)
    with pytest.raises(TransportError):
        gathering(store, 2, 1.0)
