"""Requests to leave the run, or to end it, without I/O.

A request goes to the coordinator first, so that workers may save. If it does not answer, the node leaves anyway, a
little after the time given.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from elastic_agent.protocol import Action, Cause, StopRequest

from .participant import Participant

ANSWER_PATIENCE_S = 2.0
"""How much longer than the workers' time this node waits for the coordinator's answer before it leaves without.

A node without workers stays so long in any case: a signal to all nodes reaches them at slightly different times.
"""


class StopRequests:
    """The requests to one node by signals, commands and the scheduler."""

    def __init__(
        self,
        participant: Participant,
        node_id: str,
        handles_notices: Callable[[], bool],
        call_later: Callable[[float, Callable[[], None]], object],
    ) -> None:
        """Prepare for requests.

        Args:
            participant: the node.
            node_id: its id.
            handles_notices: whether workers that run now handle notices.
            call_later: calls a function after a number of seconds.
        """
        self._participant = participant
        self._node = participant.node
        self._node_id = node_id
        self._handles_notices = handles_notices
        self._call_later = call_later

    def leave(self, reason: str, left_s: float) -> float:
        """Have this node leave after its workers and all others have saved, for which they get this much time.

        Returns:
            For how many seconds the coordinator's answer is awaited at most.
        """
        self._participant.perform(self._node.stop_lingering())
        stop_request = self._new(Cause.DRAIN, left_s, f"{self._node_id} leaves ({reason})", self._node_id)
        self._participant.perform(self._node.drain(reason, stop_request))
        patience_s = left_s + ANSWER_PATIENCE_S if self._handles_notices() else ANSWER_PATIENCE_S
        self._in_the_end(patience_s, self._node.leave_now)
        return patience_s

    def remove(self, node_id: str, left_s: float, reason: str) -> StopRequest:
        """Have another node leave."""
        stop_request = self._new(Cause.DRAIN, left_s, reason, node_id)
        self._participant.perform(self._node.request_stop(stop_request))
        return stop_request

    def end_run(self, cause: Cause, left_s: float, reason: str) -> StopRequest:
        """Have the whole run end after all workers have saved."""
        stop_request = self._new(cause, left_s, reason, None)
        self._participant.perform(self._node.request_stop(stop_request))
        self._in_the_end(left_s + ANSWER_PATIENCE_S, lambda: self._node.drain(reason))
        return stop_request

    def _new(self, cause: Cause, left_s: float, reason: str, leaver: str | None) -> StopRequest:
        # They may have begun to since the last check; the coordinator has to know it now.
        if self._handles_notices():
            self._participant.perform(self._node.handles_notices(self._node.generation))
        return StopRequest(self._node.next_stop_request, cause, left_s, reason[:512], leaver)

    def _in_the_end(self, after_s: float, act: Callable[[], Iterable[Action]]) -> None:
        """Do, at the time given, what has not been done by then."""
        self._call_later(after_s, lambda: self._participant.perform(act()))
