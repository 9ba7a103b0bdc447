"""Virtual time, and operating-system processes made of generators that freeze, thaw and die.

A task is a generator. It yields a number to sleep that many seconds, or ``(inbox, timeout)`` to wait for
an item (``None`` at the time-out, or never if the timeout is None). Nothing here runs in parallel: one
event after the other, in an order that only the seed decides.
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Callable, Generator
from random import Random
from typing import Any

Wait = Any
"""What a task may yield: seconds, or (inbox, seconds or None)."""
Routine = Generator[Wait, Any, Any]


class Middle(Random):
    """Draws nothing: returns the middle of every range, so that one draw more or less changes no other."""

    def random(self) -> float:
        return 0.5

    def choice(self, seq: Any) -> Any:
        return seq[len(seq) // 2]

    def randint(self, a: int, b: int) -> int:
        return (a + b) // 2


class Kernel:
    """The clock of the simulated universe and its list of things to come."""

    def __init__(self, seed: int, random: Random | None = None) -> None:
        self.now = 0.0
        self.random = random or Random(seed)
        self.events = 0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._count = 0

    def after(self, delay_s: float, action: Callable[..., None], *args: Any) -> None:
        """Do this ``delay_s`` from now."""
        self._count += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._count, action, args))

    def run(self, until_s: float, stop: Callable[[], bool]) -> None:
        """Let time pass until ``until_s``, or until ``stop`` says so after some event."""
        heap = self._heap
        while heap and heap[0][0] <= until_s:
            when, _, action, args = heapq.heappop(heap)
            self.now = when
            self.events += 1
            action(*args)
            if stop():
                return
        self.now = max(self.now, until_s)


class Process:
    """Something that can be frozen (it then misses nothing, but does nothing) and killed."""

    def __init__(self, kernel: Kernel, name: str) -> None:
        self.kernel = kernel
        self.name = name
        self.alive = True
        self._frozen = 0
        self.thawed_s = -1.0
        """When it last stood still."""
        self._missed: list[tuple[Callable[..., None], tuple[Any, ...]]] = []
        self.when_killed: list[Callable[[], None]] = []

    @property
    def frozen(self) -> bool:
        """Return whether it stands still."""
        return self._frozen > 0

    def spawn(self, routine: Routine) -> Task:
        """Start a task of this process."""
        task = Task(self, routine)
        self.kernel.after(0.0, task.wake, 0, None)
        return task

    def do(self, action: Callable[..., None], *args: Any) -> None:
        """Do this now, or at the thaw; never if dead."""
        if not self.alive:
            return
        if self._frozen:
            self._missed.append((action, args))
        else:
            action(*args)

    def freeze(self) -> None:
        """Stand still until thawed as often as frozen."""
        self._frozen += 1

    def thaw(self) -> None:
        """Go on; what was missed happens now, in order, but what came from outside perhaps before timers."""
        self._frozen -= 1
        self.thawed_s = self.kernel.now
        if self._frozen == 0 and self.alive:
            missed, self._missed = self._missed, []
            if self.kernel.random.random() < 0.5:
                missed.sort(key=_is_timer)
            for action, args in missed:
                self.kernel.after(0.0, self.do, action, *args)

    def kill(self) -> None:
        """End at once, whatever it was doing."""
        if self.alive:
            self.alive = False
            self._missed.clear()
            for told in self.when_killed:
                told()


def _is_timer(missed: tuple[Callable[..., None], tuple[Any, ...]]) -> bool:
    """Return whether a task that missed this waited for time to pass, and for nothing that has come meanwhile."""
    action, args = missed
    return getattr(action, "__func__", None) is Task.wake and (args[1] is None or not args[1].items)


class Inbox:
    """A queue with one reader."""

    __slots__ = ("_reader", "items", "kernel")

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.items: deque[Any] = deque()
        self._reader: tuple[Task, int] | None = None

    def put(self, item: Any) -> None:
        """Add an item and wake the reader."""
        self.items.append(item)
        if self._reader is not None:
            task, turn = self._reader
            self._reader = None
            self.kernel.after(0.0, task.wake, turn, self)

    def await_by(self, task: Task, turn: int, timeout_s: float | None) -> None:
        """Wake this task when there is an item, or at the time-out."""
        if self.items:
            self.kernel.after(0.0, task.wake, turn, self)
            return
        self._reader = (task, turn)
        if timeout_s is not None:
            self.kernel.after(timeout_s, task.wake, turn, self)


class Task:
    """One thread of a process."""

    __slots__ = ("process", "routine", "turn")

    def __init__(self, process: Process, routine: Routine) -> None:
        self.process = process
        self.routine = routine
        self.turn = 0

    def cancel(self) -> None:
        """Wait for nothing any more, and end."""
        self.turn += 1
        self.routine.close()

    def wake(self, turn: int, source: Inbox | None) -> None:
        """Go on if this is the wake-up being waited for; a stale one (of an earlier wait) is ignored."""
        process = self.process
        if turn != self.turn or not process.alive:
            return
        if process.frozen:
            process.do(self.wake, turn, source)
            return
        self.turn = turn = turn + 1
        item = source.items.popleft() if source is not None and source.items else None
        try:
            wanted = self.routine.send(item)
        except StopIteration:
            return
        if wanted.__class__ is tuple:
            inbox, timeout_s = wanted
            inbox.await_by(self, turn, timeout_s)
        else:
            process.kernel.after(wanted, self.wake, turn, None)
