"""Reading a key does not wake clients that wait for it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from elastic_agent.protocol import Plan
from elastic_agent.transport import c10d, drive
from elastic_agent.values import Endpoint

from .support import PATIENCE_S

SHORT_S = 0.3


def a_host() -> c10d.C10dHost:
    found = c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S)
    assert found is not None  # port 0: no other process can have it
    return found


def test_nodes_that_wait_for_the_next_plan_do_not_wake_each_other() -> None:
    """Several that wait cause no more traffic than their own question."""
    host = a_host()
    endpoint = Endpoint("127.0.0.1", host.port)
    nodes = [c10d.dial(endpoint, "run", PATIENCE_S) for _ in range(4)]
    questions = [0] * len(nodes)

    def wait_for_plan(number: int) -> None:
        plans = nodes[number]._plans
        ask = plans.newest

        async def counted() -> Plan | None:
            questions[number] += 1
            return await ask()

        plans.newest = counted  # type: ignore[method-assign]
        assert drive(nodes[number].next_plan(0, SHORT_S)) is None

    with ThreadPoolExecutor(len(nodes)) as pool:
        list(pool.map(wait_for_plan, range(len(nodes))))
    assert questions == [1] * len(nodes)
    host.close()
