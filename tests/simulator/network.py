"""Messages between machines and the store: delayed, held back by a cut and delivered late, or lost.

As on TCP, messages of one connection keep their order, and a lost one silences its connection for good
(clients that wait run into a time-out and dial again). A message held back by a cut can arrive after the
cut, long after its sender gave up and dialled anew: that is how stale writes come about.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from elastic_agent.transport.base import StoreLostError

from .kernel import Inbox, Kernel, Routine

if TYPE_CHECKING:
    from .machine import Machine
    from .store import Store


BROKEN = object()
"""What a waiting call gets when its connection is reset."""


@dataclass
class Network:
    """What the network does to messages at the moment."""

    kernel: Kernel
    latency_s: float = 0.002
    loss: float = 0.0
    stray: float = 0.0
    """How many requests and answers of etcd, each by itself, take far too long."""
    cut: set[str] = field(default_factory=set)
    """Machines that neither reach the store nor hear from it."""
    deaf: set[str] = field(default_factory=set)
    """Machines whose requests arrive while the answers do not."""
    slow_s: dict[tuple[str, str], float] = field(default_factory=dict)
    """(machine, "requests" or "answers") → what is added at most."""
    held: dict[str, list[tuple[Callable[..., None], tuple[Any, ...]]]] = field(default_factory=dict)

    def delay_s(self, machine: str, way: str = "requests") -> float:
        """Return how long one message takes."""
        random = self.kernel.random.random()
        extra_s = self.slow_s.get((machine, way), 0.0) if self.slow_s else 0.0
        return self.latency_s * (0.3 + random) + extra_s * random

    def heal(self, machine: str) -> None:
        """The machine reaches the store again; held messages arrive a little later."""
        self.cut.discard(machine)
        self.deaf.discard(machine)
        wait_s = self.kernel.random.uniform(0.0, 2.0)
        for action, args in self.held.pop(machine, []):
            self.kernel.after(wait_s, action, *args)


class Connection:
    """One client's connection to one life of the store."""

    def __init__(self, network: Network, machine: Machine, store: Store) -> None:
        self.network = network
        self.machine = machine
        self.store = store
        self.closed = False
        self.silent = False
        self._next_request_s = 0.0
        self._next_answer_s = 0.0
        self._waiting: Inbox | None = None
        store.connections.append(self)

    def call(self, method: str, *args: Any, timeout_s: float | None = None) -> Routine:
        """Ask the store; a sub-routine of the calling task.

        Raises:
            StoreLostError: there was no answer in time.
        """
        item = yield from self._exchange(method, args, timeout_s)
        if item is None:
            self.close()
            raise StoreLostError("no answer")
        return self._answered(item[0])

    def wait(self, method: str, *args: Any, timeout_s: float) -> Routine:
        """Ask the store for what may take any time; None if it took longer than that."""
        item = yield from self._exchange(method, args, timeout_s)
        return self._answered(item[0]) if item is not None else None

    def tell(self, method: str, *args: Any) -> None:
        """Send what is not answered."""
        if self.closed:
            raise StoreLostError("the connection is closed")
        self._send(method, args, Inbox(self.network.kernel))

    def _exchange(self, method: str, args: tuple[Any, ...], timeout_s: float | None) -> Routine:
        if self.closed:
            raise StoreLostError("the connection is closed")
        answer = self._waiting = Inbox(self.network.kernel)
        self._send(method, args, answer)
        item = yield answer, timeout_s
        self._waiting = None
        if item is BROKEN:
            self.close()
            raise StoreLostError("the connection broke")
        return item

    def _answered(self, value: Any) -> Any:
        return value

    def close(self) -> None:
        """Give the connection up; what is under way may still arrive."""
        self.closed = True

    def reset(self) -> None:
        """The store's process died: the client's kernel says so soon, if it can."""
        name = self.machine.name
        local = self.machine is self.store.machine
        if self._waiting is not None and (local or (self.store.machine.up and name not in self.network.cut)):
            self.network.kernel.after(self.network.delay_s(name), self._waiting.put, BROKEN)
        self.closed = True

    def _send(self, method: str, args: tuple[Any, ...], answer: Inbox) -> None:
        self._carry(self._arrive, (method, args, answer), is_answer=False)

    def _arrive(self, method: str, args: tuple[Any, ...], answer: Inbox) -> None:
        self.store.process.do(self.store.serve, self, method, args, lambda value: self._answer(answer, value))

    def _answer(self, answer: Inbox, value: Any) -> None:
        self._carry(answer.put, ((value,),), is_answer=True)

    def _carry(self, action: Callable[..., None], args: tuple[Any, ...], *, is_answer: bool) -> None:
        network, name = self.network, self.machine.name
        kernel = network.kernel
        if self.machine is self.store.machine:  # loopback
            kernel.after(0.0001 * (1.0 + kernel.random.random()), action, *args)
            return
        if network.loss and kernel.random.random() < network.loss:
            self.silent = True
        if self.silent:
            return
        if name in network.cut or (is_answer and name in network.deaf):
            network.held.setdefault(name, []).append((action, args))
            return
        at_s = kernel.now + network.delay_s(name, "answers" if is_answer else "requests")
        if is_answer:
            at_s = self._next_answer_s = max(at_s, self._next_answer_s)
        else:
            at_s = self._next_request_s = max(at_s, self._next_request_s)
        kernel.after(at_s - kernel.now, action, *args)
