"""The status of runs, determined in the event loop of the process that knows them."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from typing import Any, TypeVar

from elastic_agent.monitoring.status import RunStatus

ANSWER_S = 5.0
"""How long the event loop may take to determine the status."""

T = TypeVar("T")


class LoopSource:
    """Some runs (see :class:`~elastic_agent.web.server.StatusSource`). To be made in the event loop."""

    def __init__(
        self,
        who: str,
        run_ids: Callable[[], Sequence[str]],
        get_status: Callable[[str], Awaitable[RunStatus]],
    ) -> None:
        """Prepare.

        Args:
            who: knows the runs, for messages.
            run_ids: returns those that are known, the newest last; called in the event loop.
            get_status: determines the status of one of them, in the event loop.
        """
        self._who = who
        self._run_ids = run_ids
        self._get_status = get_status
        self._loop = asyncio.get_running_loop()

    def run_ids(self) -> Sequence[str]:
        """The runs that are known.

        Raises:
            TimeoutError: the event loop does not answer, or has ended.
        """
        return self._answer(self._list())

    def status(self, run_id: str) -> RunStatus:
        """The status of one of them.

        Raises:
            TimeoutError: the event loop does not answer, or has ended.
            LookupError: there is no such run.
        """
        return self._answer(self._determine(run_id))

    def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        if self._loop.is_closed():
            work.close()
            raise TimeoutError(f"{self._who} has ended")
        answer = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return answer.result(ANSWER_S)
        except TimeoutError:
            answer.cancel()
            raise TimeoutError(f"{self._who} did not answer within {ANSWER_S:g} s") from None

    async def _list(self) -> Sequence[str]:
        return self._run_ids()

    async def _determine(self, run_id: str) -> RunStatus:
        return await self._get_status(run_id)
