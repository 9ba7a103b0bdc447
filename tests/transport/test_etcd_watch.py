"""Who waits for a change in etcd is woken by it, and not by the end of the time that it would wait."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from elastic_agent.transport.etcd.api import put
from elastic_agent.transport.etcd.client import EtcdClient
from tests.loop_thread import in_loop

from .etcd_scene import EtcdScene, first_change
from .support import PATIENCE_S

T = TypeVar("T")

LATER_WATCHES = 3


async def woken_by_a_change(wait: Coroutine[Any, Any, T], client: EtcdClient, key: bytes) -> T:
    """Return what a wait ends with when another client writes this key.

    etcd tells watches that begin after a change of it ten times a second, and those that are there before: so some of
    the former, one after the other, see it later than the wait.
    """
    waiting = asyncio.create_task(wait)
    try:
        written = await client.transact([], [put(key, b"changed")])
        for _ in range(LATER_WATCHES):
            await first_change(client, key, int(written.header.revision))
        assert waiting.done(), f"{LATER_WATCHES} watches that began after the change saw it first"
        return waiting.result()
    finally:
        waiting.cancel()


def test_a_change_by_another_client_wakes_who_waits_for_the_key(etcd_scene: EtcdScene) -> None:
    """By the watch that begins with the first wait, and stays open for the next ones."""
    table, other = etcd_scene.table(), etcd_scene.dial()

    async def story() -> None:
        for _ in range(3):
            await table.read(["x/key"])
            assert await woken_by_a_change(
                table.wait("x/key", 10 * PATIENCE_S), other, etcd_scene.key("x/key")
            )

    in_loop(story())


def test_a_changed_member_record_wakes_the_coordinator(etcd_scene: EtcdScene) -> None:
    leadership, other = etcd_scene.leadership().leadership, etcd_scene.dial()
    keys = etcd_scene.life_keys()

    async def story() -> None:
        for incarnation in ("a-1", "b-1", "a-1"):
            key = etcd_scene.key(keys.member(incarnation))
            assert await woken_by_a_change(leadership.wait(10 * PATIENCE_S), other, key) == [incarnation]

    in_loop(story())
