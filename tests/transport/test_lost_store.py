"""A store whose process is killed: every call says so, in one line."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from elastic_agent.transport import CoordinatorRecords, c10d
from elastic_agent.transport.base import StoreLostError, TransportError
from tests.loop_thread import Blocking, in_loop

from .support import PATIENCE_S, free_endpoint, lease, life_keys, member, peers, plan


def test_every_call_to_a_killed_store_raises_store_lost() -> None:
    endpoint = free_endpoint()
    with peers(1, endpoint) as (host,):
        assert host.elect()[0]

        def table() -> c10d.C10dTable:
            return in_loop(c10d.open_table(endpoint, PATIENCE_S))

        def coordinator() -> Blocking:
            return Blocking(CoordinatorRecords(table(), life_keys(table())))

        def inbox() -> Blocking:
            return Blocking(c10d.C10dInbox(table(), table()))

        def agree() -> str:
            return in_loop(c10d.agree_run_id(endpoint, "job", "run-1", PATIENCE_S))

        def node() -> Blocking:
            return Blocking(in_loop(c10d.dial(endpoint, "run", PATIENCE_S)))

        calls: list[Callable[[], Any]] = []
        for make, ask in _asked(node, coordinator, inbox):
            link = make()
            calls.append(lambda ask=ask, link=link: ask(link))
        host.kill()
        for number, call in enumerate(calls):
            with pytest.raises(StoreLostError) as caught:
                call()
            assert "\n" not in str(caught.value), number
        for dial in (node, coordinator, agree):
            with pytest.raises(TransportError, match="connection refused"):
                dial()


def _asked(node: Any, coordinator: Any, inbox: Any) -> list[tuple[Callable[[], Any], Callable[[Any], Any]]]:
    held = lease("a")
    return [
        (node, lambda link: link.register(member("a"), held)),
        (node, lambda link: link.write(member("a"))),
        (node, lambda link: link.renew(held, held.renewed())),
        (node, lambda link: link.read_lease("a")),
        (node, lambda link: link.read_plan()),
        (node, lambda link: link.read_status()),
        (node, lambda link: link.next_plan(0, PATIENCE_S)),
        (coordinator, lambda link: link.read(None)),
        (coordinator, lambda link: link.read(["a"])),
        (coordinator, lambda link: link.read_leases(["a"])),
        (coordinator, lambda link: link.read_plan()),
        (coordinator, lambda link: link.publish(plan(1))),
        (coordinator, lambda link: link.revoke(held)),
        (inbox, lambda box: box.wait(PATIENCE_S)),
        (inbox, lambda box: box.runs()),
    ]
