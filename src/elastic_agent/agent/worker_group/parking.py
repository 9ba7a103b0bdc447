"""Workers that park: they leave their world when it ends, keep process and state, and go on in the next one.

New ones that are started apart from any world park before their first one.

A worker that can do so says it on the line over which it is asked for its progress (:mod:`.collectives`), and there it
is told to park and to go on. What has not parked within :data:`PARK_S` is stopped, and what does not go on within
:data:`GO_ON_S` counts as a worker that could not be started.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from elastic_agent.agent.tasks import in_this_loop
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.linux import is_frozen
from elastic_agent.logs import get_logger
from elastic_agent.workers.cleanup import Cleanup
from elastic_agent.workers.context import WorkerContext
from elastic_agent.workers.guard import client as guard_events

from .endings import log_cleanup

PARK_S = 1.0
"""The time that workers may take to park."""

GO_ON_S = 5.0
"""The time that a worker may take to say that it goes on."""

CAN_PARK, HAS_PARKED, GOES_ON = "can park", "has parked", "goes on"
"""The words that workers say; anything else means that they cannot park any more."""

PARK, RAISE = b"park", b"raise"
"""The words to them: to leave their world; that there is no next one, so that the error with which they left it is
raised; or, as JSON, what differs in the world in which they go on."""


class Parking:
    """The words that the workers of the present generation have said about parking."""

    def __init__(self, send: Callable[[bytes, bytes], bool]) -> None:
        """``send``: sends a message to the worker at this address, and returns whether that was possible."""
        self._send = send
        self.can: dict[int, bytes] = {}
        """By slot, where the workers that can park are told to."""
        self.have_parked: set[int] = set()
        """The slots of workers that have parked."""
        self.go_on: set[int] = set()
        """The slots of workers that have parked in the generation before, and go on."""
        self.on_news: Callable[[int], None] = lambda slot: None
        """Called with the slot of each worker that has said something."""

    def clear(self) -> None:
        """Forget the workers: those of another generation begin."""
        self.can.clear()
        self.have_parked.clear()
        self.go_on.clear()

    def take_in(self, slot: int, said: str, peer: bytes) -> None:
        """Take note of what a worker says."""
        if said == CAN_PARK:
            self.can[slot] = peer
        elif said == GOES_ON:
            self.go_on.add(slot)
        elif said == HAS_PARKED and self.can.get(slot) == peer:
            self.have_parked.add(slot)
        elif self.can.get(slot) == peer:  # its training is over, or it has another process group
            del self.can[slot]
            self.have_parked.discard(slot)
        self.on_news(slot)

    def forget_replaced(self, parked: Parked, pids: Mapping[int, int]) -> None:
        """Forget parked workers that have ended, and others were started in their place; these may have parked."""
        for slot, pid in parked.pids.items():
            if pids.get(slot) != pid and self.can.get(slot) == parked.peers.get(slot):
                self.can.pop(slot, None)
                self.have_parked.discard(slot)

    def tell_to_park(self) -> None:
        """Have the workers park that can."""
        for peer in self.can.values():
            self._send(PARK, peer)

    def tell_to_raise(self, slot: int) -> None:
        """Have a worker that has parked by itself raise the error with which it left its world."""
        self.have_parked.discard(slot)
        if peer := self.can.pop(slot, None):
            self._send(RAISE, peer)

    def tell_to_go_on(self, peer: bytes, context: WorkerContext, slot: int) -> None:
        """Have a parked worker go on as the one of this slot; it says so when it does."""
        order = {
            "generation": context.generation,
            "variables": context.variables(slot),
            "stdout": context.stdouts[slot],
            "stderr": context.stderrs[slot],
        }
        self._send(json.dumps(order).encode(errors="surrogateescape"), peer)


@dataclass
class Parked:
    """The parked workers of a generation that is over, between two worlds."""

    generation: int
    pids: dict[int, int]
    """By slot."""
    peers: Mapping[int, bytes]
    """Where each is told to go on."""
    heartbeats: HeartbeatFile
    """They go on using it."""
    cleanup: Cleanup
    """It knows what their processes hold, and what those have left that ended."""
    left_world: bool
    """Some of them have been in a world."""
    gone: asyncio.Event = field(default_factory=asyncio.Event)

    async def end(self, guard: guard_events.Guard) -> None:
        """Have the guard stop them at once: they are in the middle of nothing. A guard that is frozen is killed."""
        guard.stop(0.0)
        if is_frozen(guard.pid):
            os.kill(guard.pid, signal.SIGKILL)
        await self.gone.wait()

    def take_in(self, event: guard_events.GuardEvent) -> None:
        """Take note of an event of the guard."""
        if isinstance(event, guard_events.Exited):
            if self.pids.pop(event.slot, None) is not None and not event.stopping:
                code = event.returncode
                get_logger().warning(
                    f"worker {event.slot} ended while it waited for its next world", code=code
                )
        elif isinstance(event, guard_events.Stopped | guard_events.GuardLost):
            self.pids.clear()
            self.heartbeats.close()
            leftovers = self.cleanup.for_next()
            leftovers.started()
            leftovers.clear(in_this_loop(log_cleanup))
            self.gone.set()
