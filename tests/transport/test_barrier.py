"""The nodes of a world agree, over its bootstrap store, whether all of them came."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from elastic_agent.torchrun.node import Gathering
from elastic_agent.transport.base import TransportError
from elastic_agent.transport.c10d.bootstrap import BootstrapStore, PortPicker
from tests.loop_thread import Blocking, background_loop

from .support import PATIENCE_S


def arrive(store: BootstrapStore, size: int) -> list[Blocking]:
    return [Blocking(Gathering(store.address, size, rank)) for rank in range(size)]


def cancel(node: Blocking) -> None:
    background_loop().call_soon_threadsafe(node.cancelled.set)


def together(*calls: Callable[[], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(calls)) as pool:
        return [future.result(PATIENCE_S) for future in [pool.submit(call) for call in calls]]


def test_the_barrier_opens_when_the_last_node_joins(store: BootstrapStore) -> None:
    for size in (1, 5):
        another = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
        calls = [lambda node=node: node.come(PATIENCE_S) for node in arrive(another, size)]
        assert together(*calls) == [True] * size
        another.close()


def test_a_node_that_cancels_cancels_for_all_also_late_ones(store: BootstrapStore) -> None:
    nodes = arrive(store, 3)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(nodes[0].come, PATIENCE_S)
        cancel(nodes[1])
        assert nodes[1].come(PATIENCE_S) is False
        assert waiting.result(PATIENCE_S) is False
    assert nodes[2].come(PATIENCE_S) is False


def test_a_race_of_the_last_node_and_a_cancel_has_one_result_for_all() -> None:
    for _ in range(40):
        store = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
        first, second = arrive(store, 2)
        *heard, _ = together(
            lambda first=first: first.come(PATIENCE_S),
            lambda second=second: second.come(PATIENCE_S),
            lambda first=first: cancel(first),
        )
        assert len(set(heard)) == 1
        store.close()


def test_a_node_cancels_at_its_timeout(store: BootstrapStore) -> None:
    first, second = arrive(store, 2)
    assert first.come(0.05) is False
    assert second.come(PATIENCE_S) is False


def test_the_host_waits_until_no_node_needs_the_store(store: BootstrapStore) -> None:
    host, other = arrive(store, 2)
    assert together(lambda: host.come(PATIENCE_S), lambda: other.come(PATIENCE_S)) == [True, True]
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(host.go, await_all_s=PATIENCE_S)
        other.go(await_all_s=0.0)
        waiting.result(PATIENCE_S)


def test_a_lost_store_is_an_error_at_the_barrier(store: BootstrapStore) -> None:
    node, late = arrive(store, 2)
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(node.come, 10 * PATIENCE_S)
        store.close()
        with pytest.raises(TransportError):
            waiting.result(PATIENCE_S)
    with pytest.raises(TransportError):
        late.come(1.0)
