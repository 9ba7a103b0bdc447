"""Delivery of metrics and events to the handlers that were registered with torch, in a thread of its own.

A handler may be slow (it writes to a database over a network that fails, say) or raise: neither delays the agent, and
both are logged once.
"""

from __future__ import annotations

import functools
import logging
import queue
import socket
import threading
import time
from collections.abc import Callable

from torch.distributed.elastic import events as torch_events
from torch.distributed.elastic import metrics as torch_metrics
from torch.distributed.elastic.events.api import Event, RdzvEvent
from torch.distributed.elastic.events.handlers import get_logging_handler
from torch.distributed.elastic.metrics import api as metrics

from elastic_agent.logs import get_logger
from elastic_agent.printable import plain
from elastic_agent.workers.torch_adapter import event_handler_names

METRIC_GROUP = "torchelastic"
"""The group of all metrics of torchrun's agent."""

RENDEZVOUS_HANDLER = "dynamic_rendezvous"
"""torch's name of the handler that gets the events of the rendezvous."""

MOST_WAITING = 1000
"""How many metrics and events may wait for the handlers; when more do, the newest are lost."""


class TorchHandlers:
    """Hands metrics and events to torch's handlers, one after the other; does nothing if none is registered."""

    def __init__(self, event_log_handler: str) -> None:
        """``event_log_handler``: the name under which the handler of events is registered.

        Raises:
            ValueError: no handler has this name.
        """
        names = event_handler_names()
        if event_log_handler not in names:
            raise ValueError(
                f"--event-log-handler {event_log_handler}: no such handler is registered with "
                f"torch.distributed.elastic.events; registered: {', '.join(sorted(names))}"
            )
        self._destination = event_log_handler
        self._queue: queue.Queue[Callable[[], None] | None] = queue.Queue(MOST_WAITING)
        self._thread: threading.Thread | None = None
        self._told: set[str] = set()
        """The problems that were logged."""
        try:  # as torchrun does before it starts the agent; a site's static_init replaces it
            torch_metrics.initialize_metrics(metrics.MetricsConfig())
        except Exception as error:
            self._tell("metrics", f"torch's metrics cannot be initialized: {_in_one_line(error)}")

    # -- from the agent's loop; none of these waits ---------------------------------------------

    def put_metric(self, name: str, value: int) -> None:
        """Publish a value, as ``torch.distributed.elastic.metrics.put_metric`` does."""
        if not isinstance(metrics.getStream(METRIC_GROUP).handler, metrics.NullMetricHandler):
            self._submit("metrics", functools.partial(metrics.put_metric, name, value, METRIC_GROUP))

    def record(self, event: Event) -> None:
        """Record an event, with the name of this host, as ``torch.distributed.elastic.events.record`` does."""
        if not _has_listener(self._destination):
            return

        def deliver() -> None:
            event.metadata["hostname"] = _host_name()
            torch_events.record(event, self._destination)

        self._submit("events", deliver)

    @property
    def records_rendezvous(self) -> bool:
        """Whether there is a handler for events of the rendezvous."""
        return _has_listener(RENDEZVOUS_HANDLER)

    def record_rendezvous(self, event: RdzvEvent) -> None:
        """Record an event of the rendezvous, with the name of this host."""
        if not self.records_rendezvous:
            return

        def deliver() -> None:
            event.hostname = _host_name()
            torch_events.record_rdzv_event(event)

        self._submit("events of the rendezvous", deliver)

    def _submit(self, kind: str, deliver: Callable[[], None]) -> None:
        if self._thread is None:
            self._thread = threading.Thread(target=self._run, name="torch-handlers", daemon=True)
            self._thread.start()
        try:
            self._queue.put_nowait(functools.partial(self._deliver, kind, deliver))
        except queue.Full:
            self._tell(
                "slow",
                f"the handlers of torch.distributed.elastic are slower than the events: more than {MOST_WAITING} "
                "wait for them, and the newest are lost; the run continues",
            )

    def finish(self, timeout_s: float) -> None:
        """Wait until everything is delivered, at most for this time; to be called once, when the run has ended."""
        if self._thread is None:
            return
        until_s = time.monotonic() + timeout_s
        try:
            self._queue.put(None, timeout=timeout_s)
            self._thread.join(max(0.0, until_s - time.monotonic()))
        except queue.Full:
            pass
        if self._thread.is_alive():
            self._tell(
                "late",
                f"the handlers of torch.distributed.elastic did not return within {timeout_s:g} s; the last metrics "
                "and events are lost",
            )

    # -- in the thread --------------------------------------------------------------------------

    def _run(self) -> None:
        while (work := self._queue.get()) is not None:
            work()

    def _deliver(self, kind: str, deliver: Callable[[], None]) -> None:
        try:
            deliver()
        except BaseException as error:  # SystemExit, too, would end the thread
            self._tell(
                kind,
                f"torch's handler of {kind} failed: {_in_one_line(error)}; the run continues, and further errors of "
                "this handler are not logged",
            )

    def _tell(self, problem: str, text: str) -> None:
        if problem not in self._told:
            self._told.add(problem)
            get_logger().warning(text)


def _has_listener(destination: str) -> bool:
    """Whether an event for this destination reaches a handler that does anything; some attach theirs to the logger."""
    attached = logging.getLogger(f"torchelastic-events-{destination}").handlers
    return any(
        not isinstance(one, logging.NullHandler) for one in (get_logging_handler(destination), *attached)
    )


@functools.cache
def _host_name() -> str:
    """As torchrun's agent determines it; asks the name service, which may take long."""
    return socket.getfqdn(socket.gethostname())


def _in_one_line(error: BaseException) -> str:
    text = " ".join(plain(str(error)).split())[:300]
    return f"{type(error).__name__}: {text}" if text else type(error).__name__
