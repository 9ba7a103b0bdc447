"""The status of the one run of an agent, determined in the agent's event loop."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence

from elastic_agent.monitoring.status import RunStatus

ANSWER_S = 5.0
"""How long the event loop may take to determine the status."""

GetStatus = Callable[[], Awaitable[RunStatus]]


class LoopSource:
    """One run (see :class:`~elastic_agent.web.server.StatusSource`). To be made in the event loop."""

    def __init__(self, run_id: str, get_status: GetStatus) -> None:
        """``get_status`` determines the status, in the running event loop."""
        self._run_id = run_id
        self._get_status = get_status
        self._loop = asyncio.get_running_loop()

    def run_ids(self) -> Sequence[str]:
        """The run."""
        return (self._run_id,)

    def status(self, run_id: str) -> RunStatus:
        """Its status.

        Raises:
            TimeoutError: the event loop does not answer, or has ended.
        """
        if self._loop.is_closed():
            raise TimeoutError("the agent has ended")
        answer = asyncio.run_coroutine_threadsafe(self._determine(), self._loop)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            raise TimeoutError(f"the agent did not answer within {ANSWER_S:g} s") from None

    async def _determine(self) -> RunStatus:
        return await self._get_status()
