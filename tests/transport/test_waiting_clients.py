"""Reading a key does not wake clients that wait for it."""

from __future__ import annotations

import asyncio

from elastic_agent.protocol import Plan
from elastic_agent.transport import NodeRecords, c10d
from elastic_agent.values import Endpoint

from .support import PATIENCE_S

SHORT_S = 0.3


def test_nodes_that_wait_for_the_next_plan_do_not_wake_each_other() -> None:
    """Several that wait cause no more traffic than their own question."""

    async def wait_for_plan(node: NodeRecords) -> int:
        plans = node._plans
        ask = plans.newest
        questions = 0

        async def counted() -> Plan | None:
            nonlocal questions
            questions += 1
            return await ask()

        plans.newest = counted  # type: ignore[method-assign]
        assert await node.next_plan(0, SHORT_S) is None
        return questions

    async def wait_together() -> None:
        host = await c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S)
        assert host is not None  # port 0: no other process can have it
        endpoint = Endpoint("127.0.0.1", host.port)
        nodes = [await c10d.dial(endpoint, "run", PATIENCE_S) for _ in range(4)]
        assert await asyncio.gather(*map(wait_for_plan, nodes)) == [1] * len(nodes)
        for node in nodes:
            node.close()
        host.close()

    asyncio.run(wait_together())
