"""Reading a key does not wake clients that wait for it."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import pytest

from elastic_agent.transport import c10d
from elastic_agent.transport.c10d.store import StoreClient
from elastic_agent.values import Endpoint

from .support import PATIENCE_S

SHORT_S = 0.3


def client(host: c10d.C10dHost) -> StoreClient:
    return StoreClient.connect("127.0.0.1", host.port, PATIENCE_S)


def looked_at_while_waited_for(host: c10d.C10dHost, look: Callable[[StoreClient], object]) -> bool:
    """Whether the one who waits was told that the key is there; it never is."""
    waiting, looking = client(host), client(host)
    over = threading.Event()

    def look_on() -> None:
        while not over.is_set():
            assert not look(looking)

    with ThreadPoolExecutor(1) as pool:
        looks = pool.submit(look_on)
        told = waiting.wait("key", SHORT_S)
        over.set()
        looks.result(PATIENCE_S)
    return told


def a_host() -> c10d.C10dHost:
    found = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S)
    assert found is not None  # port 0: no other process can have it
    return found


@pytest.mark.parametrize(
    "look", [lambda client: client.peek("key"), lambda client: client.peek_many(["key"])]
)
def test_a_waiting_client_is_not_woken_by_reads_of_the_key(look: Callable[[StoreClient], object]) -> None:
    host = a_host()
    assert not looked_at_while_waited_for(host, look)
    host.close()


def test_nodes_that_wait_for_the_next_plan_do_not_wake_each_other() -> None:
    """Several that wait cause no more traffic than their own question."""
    host = a_host()
    endpoint = Endpoint("127.0.0.1", host.port)
    links = [c10d.dial(endpoint, "run", PATIENCE_S) for _ in range(4)]
    questions = [0] * len(links)

    def wait_for_plan(number: int) -> None:
        plans = links[number]._plans
        ask = plans.newest

        def counted() -> object:
            questions[number] += 1
            return ask()

        plans.newest = counted  # type: ignore[method-assign,assignment]
        assert links[number].next_plan(0, SHORT_S) is None

    with ThreadPoolExecutor(len(links)) as pool:
        list(pool.map(wait_for_plan, range(len(links))))
    assert questions == [1] * len(links)
    host.close()
