"""torch's ``RendezvousHandler`` for stock torchrun: ``torchrun --rdzv-backend elastic …``.

torchrun gets its worlds from a :class:`~.node.TorchrunNode`, which takes part in the run in an event loop in a thread
beside it, and so ends and is stopped with torchrun.

Limitations with torchrun: its workers are not fenced (no guard kills them at the lease's deadline), it counts
restarts for each of its agents separately, and a torchrun that gives up leaves the run to the others.
"""

from __future__ import annotations

import asyncio
import atexit
import contextlib
import sys
import threading
from collections.abc import Callable
from concurrent.futures import FIRST_COMPLETED, CancelledError, Future, wait
from datetime import timedelta

from torch._C._distributed_c10d import PrefixStore, TCPStore
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousInfo,
    RendezvousStoreInfo,
    RendezvousTimeoutError,
)

from elastic_agent.logs import get_logger
from elastic_agent.protocol import Outcome
from elastic_agent.store_servers import first_line

from .node import Gathering, TorchrunNode

STORE_TIMEOUT_S = 300.0
"""The time that torchrun's own exchange of ranks may take."""

LEAVE_PATIENCE_S = 20.0
"""The time that the node gets to leave after a failure (see :data:`.node.LEAVE_TIMEOUT_S`)."""

LAST_MOMENT_S = 3.0
"""The same at the interpreter's exit, after a signal."""

EXIT_BARRIER = "torchelastic/agent/terminal_state"
"""Prefix of the keys of torchrun's exit barrier; torch's private name, which a test compares."""

_ENDED = "what takes part in the rendezvous for torchrun has ended unexpectedly; see its message above"


class ElasticRendezvous(RendezvousHandler):
    """The rendezvous for stock torchrun. One worker seat stands for each node; torchrun assigns the ranks."""

    def __init__(self, backend: str, run_id: str, node: TorchrunNode) -> None:
        """Start the thread, so that the node takes part by the time a world is requested.

        ``backend``: the name this handler was registered under; ``run_id``: as the user gave it.
        """
        self._backend = backend
        self._run_id = run_id
        self._node = node
        self._is_closed = False
        self._ended: Future[Gathering | None] = Future()
        """Done when the thread has ended, expected or not."""
        self._runner = asyncio.Runner(loop_factory=asyncio.new_event_loop)
        self._loop = self._runner.get_loop()
        # A daemon: the interpreter waits for other threads before it calls what leaves the run.
        self._thread = threading.Thread(target=self._take_part, name="rendezvous", daemon=True)
        self._thread.start()
        # After a signal torchrun does not shut its rendezvous down; its workers are stopped by then.
        atexit.register(self._leave, False, LAST_MOMENT_S)

    # -- torch's interface ----------------------------------------------------------------------

    def get_backend(self) -> str:
        """Return the name this handler was registered under."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """The workers' store is hosted by one of the nodes, fresh in every generation."""
        return True

    def get_run_id(self) -> str:
        """Return the run's id."""
        return self._run_id

    def next_rendezvous(self) -> RendezvousInfo:
        """Take part in the next world; blocks until it is sealed with this node in it."""
        world = self._next_world()
        address = world.store
        try:
            store = TCPStore(
                address.host,
                address.port,
                is_master=False,
                timeout=timedelta(seconds=STORE_TIMEOUT_S),
                wait_for_workers=False,
            )
        except RuntimeError as error:
            raise RendezvousConnectionError(
                f"the bootstrap store at {address} cannot be reached: {first_line(error)}"
            ) from None
        return RendezvousInfo(
            _AgentStore(store, lambda: self._call(self._node.finish)),
            world.rank,
            world.size,
            RendezvousStoreInfo(address.host, address.port),
        )

    def num_nodes_waiting(self) -> int:
        """Return more than 0 when the world of the last rendezvous is over: torchrun starts the next one."""
        return int(self._node.is_stale or self._node.over is not None or self._ended.done())

    def is_closed(self) -> bool:
        """Return whether there will be no other world."""
        return self._is_closed or self._node.over is not None

    def set_closed(self) -> None:
        """Leave the run to the others: torchrun gives up."""
        self._is_closed = True
        self._call(self._node.leave, False)

    def shutdown(self) -> bool:
        """Leave the run, once the others need nothing of this node any more.

        torchrun calls this after its workers have exited; if they failed, while that exception is being propagated.
        """
        atexit.unregister(self._leave)
        succeeded = sys.exception() is None and not self._is_closed
        self._leave(succeeded, None if succeeded else LEAVE_PATIENCE_S)
        return True

    # -- the thread -----------------------------------------------------------------------------

    def _take_part(self) -> None:
        try:
            with self._runner:
                self._runner.run(self._node.run())
        except Exception:
            get_logger().exception("internal error of the rendezvous for torchrun")
        finally:
            self._ended.set_result(None)

    def _call(self, function: Callable[..., object], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the thread has ended, and its loop is closed
            self._loop.call_soon_threadsafe(function, *args)

    def _next_world(self) -> Gathering:
        node, timeout_s = self._node, self._node.policy.join_timeout_s
        request = node.next_world()
        try:
            answer = asyncio.run_coroutine_threadsafe(request, self._loop)
        except RuntimeError:  # the thread has ended, and closed its loop
            request.close()
            raise RendezvousConnectionError(_ENDED) from None
        if not wait([answer, self._ended], timeout_s, FIRST_COMPLETED).done:
            answer.cancel()
            why = f": {node.trouble}" if node.trouble else ""
            raise RendezvousTimeoutError(f"no world was formed within {timeout_s:g} s at {node.shown}{why}")
        try:
            world = answer.result(0.0)
        except (CancelledError, TimeoutError):
            self._thread.join()  # or a later call could still begin in its loop
            raise RendezvousConnectionError(_ENDED) from None
        if world is not None:
            return world
        assert node.over is not None  # or there would be a world
        if node.over.outcome is Outcome.UNREACHABLE:
            raise RendezvousConnectionError(node.over.reason)
        raise RendezvousClosedError(f"the run is over: {node.over.reason}")

    def _leave(self, succeeded: bool, timeout_s: float | None) -> None:
        self._call(self._node.leave, succeeded)
        self._thread.join(timeout_s)


class _AgentStore(PrefixStore):
    """The store over which torchrun's agents exchange ranks; detects when this one enters the exit barrier."""

    def __init__(self, store: TCPStore, on_finishing: Callable[[], None]) -> None:
        super().__init__("torchelastic-agents", store)
        self._on_finishing = on_finishing

    def add(self, key: str, amount: int) -> int:
        """Count up; the exit barrier begins with it."""
        if key.startswith(EXIT_BARRIER):
            self._on_finishing()
        return super().add(key, amount)
