"""Runs an agent's part in the election of a run's coordinator, over connections to etcd."""

from __future__ import annotations

import os
import platform
import random
import threading
import time
from collections.abc import Callable, Collection
from typing import Any

from elastic_agent.logs import get_logger
from elastic_agent.rendezvous.coordinator_effects import LEAST_WAIT_S, WaitForHints, performer
from elastic_agent.rendezvous.effects import BackOff, Effect, Sleep, run
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import LifeKeys, RunKeys, TransportError
from elastic_agent.transport.etcd import EtcdClient, Leadership, await_no_leader, campaign_for

from .election import (
    AwaitNoLeader,
    Campaign,
    Connect,
    Election,
    LeaderEffect,
    Resign,
    WaitForMark,
    keep_leading,
)


class ElectionThread(threading.Thread):
    """Takes part in a run's election until stopped, or until the run is over and every live node knows it."""

    def __init__(
        self,
        run_id: str,
        root: str,
        dial: Callable[[], EtcdClient],
        history_store: RunHistoryStore,
        lease_ttl_s: float,
        on_change: Callable[[], None],
        *,
        compares: bool = True,
    ) -> None:
        """Prepare; ``start()`` begins.

        Args:
            run_id: the run's name.
            root: of all keys in etcd.
            dial: a new connection to a member that answers.
            history_store: the run histories on this machine's disk.
            lease_ttl_s: of the run's nodes, seconds.
            on_change: called (in this thread) whenever ``winding_up`` may have changed.
            compares: whether to warn of nodes whose software or settings differ.
        """
        super().__init__(name="elastic-coordinator", daemon=True)
        self._run_id = run_id
        self._root = root
        self._run = RunKeys(run_id)
        self._dial = dial
        self._history_store = history_store
        self._lease_ttl_s = lease_ttl_s
        self._on_change = on_change
        self._who = f"{platform.node()}:{os.getpid()}"
        self._stopping = threading.Event()
        self._election = Election(time.monotonic, get_logger(run=run_id), compares=compares)
        self._client: EtcdClient | None = None
        self._leadership: Leadership | None = None
        self._keeper: LeaderKeyThread | None = None
        self.winding_up = False
        """Whether this agent coordinates a run that has its outcome, and whose records it is still to remove."""

    def stop(self) -> None:
        """End; another agent takes over at once. Waits for etcd a second at most."""
        self._election.stop()
        self._stopping.set()
        leadership, client = self._leadership, self._client
        if leadership is not None:
            leadership.resign()
        if client is not None:
            client.close()

    def mark(self) -> None:
        """This agent's own lease was just renewed: have a mark written, if it leads; returns at once."""
        keeper = self._keeper
        if keeper is not None:
            keeper.mark()

    def run(self) -> None:
        """Take part."""
        try:
            run(self._election.run(), self._perform)
        finally:
            self._close()
            self._report()

    def _report(self) -> None:
        if self._election.winding_up != self.winding_up:
            self.winding_up = self._election.winding_up
            self._on_change()

    # -- performing the election's effects ------------------------------------------------------

    def _perform(self, effect: Effect[Any]) -> Any:
        self._report()
        match effect:
            case Sleep(pause_s):
                return self._stopping.wait(pause_s)
            case BackOff(most_s):
                return self._stopping.wait(random.uniform(0.0, most_s))
            case Connect():
                self._close()
                self._client = self._dial()
                return None
            case AwaitNoLeader(patience_s):
                return await_no_leader(self._connected(), self._root, self._run, patience_s)
            case Campaign(life):
                return self._campaign(life)
            case _:
                return self._perform_as_leader(effect)

    def _connected(self) -> EtcdClient:
        assert self._client is not None  # the election connects first
        return self._client

    def _close(self) -> None:
        if self._client is not None:
            self._client.close()
            self._client = None

    def _campaign(self, life: str) -> bool:
        sent_s, keys = time.monotonic(), LifeKeys(self._run, life)
        self._leadership = campaign_for(self._connected(), self._root, keys, self._who, self._lease_ttl_s)
        if self._leadership is not None:
            self._keeper = LeaderKeyThread(self._leadership, sent_s)
            self._keeper.start()
        return self._leadership is not None

    def _perform_as_leader(self, effect: Effect[Any]) -> Any:
        leadership = self._leadership
        assert leadership is not None  # elected
        match effect:
            case WaitForHints(until_s):
                return self._wait(leadership, until_s)
            case Resign():
                return self._resign(leadership)
            case LeaderEffect():
                return effect.perform(leadership)
            case _:
                return performer(self._run_id, leadership.records, self._history_store)(effect)

    def _wait(self, leadership: Leadership, until_s: float) -> Collection[str]:
        if self._stopping.is_set():
            raise TransportError("this agent is resigning as the coordinator of the run")
        return leadership.wait(max(LEAST_WAIT_S, until_s - time.monotonic()))

    def _resign(self, leadership: Leadership) -> None:
        if self._keeper is not None:
            self._keeper.stop()
        self._leadership = self._keeper = None
        leadership.resign()


class LeaderKeyThread(threading.Thread):
    """Keeps the leader key alive. When leadership is lost it closes the connection, so that no call waits longer."""

    def __init__(self, leadership: Leadership, elected_s: float) -> None:
        """``elected_s``: when the key was requested (``time.monotonic()``)."""
        super().__init__(name="etcd-leader", daemon=True)
        self._leadership = leadership
        self._elected_s = elected_s
        self._wake = threading.Event()
        self._stopping = False

    def stop(self) -> None:
        """Leadership is given up."""
        self._stopping = True
        self._wake.set()

    def mark(self) -> None:
        """Have a mark written now."""
        self._wake.set()

    def run(self) -> None:
        """Until leadership is lost or given up."""
        try:
            lost = run(keep_leading(time.monotonic, self._leadership.ttl_s, self._elected_s), self._perform)
        except Exception as error:
            get_logger().exception("internal error while renewing the lease of the leader key")
            lost = f"the lease of the leader key is no longer renewed: {error}"
        if lost:
            self._leadership.lose(lost)

    def _perform(self, effect: Effect[Any]) -> Any:
        if isinstance(effect, LeaderEffect):
            return effect.perform(self._leadership)
        assert isinstance(effect, WaitForMark)
        is_marking = self._wake.wait(max(0.0, effect.until_s - time.monotonic()))
        self._wake.clear()
        return None if self._stopping else is_marking
