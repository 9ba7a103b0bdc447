"""A node's session in its owner's asyncio loop: performs the effects of :class:`~.node_session.NodeSession`.

The parts of the session are asyncio tasks, so the timer that detects the end of the lease runs while any request to the
store hangs; and an agent whose loop hangs does not renew.
"""

from __future__ import annotations

import asyncio
import random
from typing import Any

from elastic_agent.linux import boottime_s
from elastic_agent.logs import get_logger
from elastic_agent.protocol import Member, Waiting
from elastic_agent.transport import run_abandonable

from .asyncio_runner import in_time, run_async, until_one_ends
from .effects import BackOff, Effect, Signal, Sleep, UntilOneEnds, Wait
from .node_session import NodeSession
from .store_requests import Call, Connect, DialBootstrap, OfferBootstrap, StoreDialer

DIAL_TIMEOUT_S = 30.0
"""An attempt to connect that takes longer than this is abandoned."""

BOOTSTRAP_TIMEOUT_S = 5.0


class Session(NodeSession):
    """A node's session with its store."""

    def __init__(
        self, dialer: StoreDialer, member: Member, lease_ttl_s: float, address: str | None = None
    ) -> None:
        """Prepare; nothing is dialled before :meth:`run`.

        Args:
            dialer: how to reach the store.
            member: the node's record, in its first state.
            lease_ttl_s: how long a lease lasts, seconds.
            address: under which the other nodes reach this one; None: the one it reaches the store from.
        """
        super().__init__(member, lease_ttl_s, boottime_s, address, _log_warning)
        self._dialer = dialer

    async def run(self) -> None:
        """Stay registered until cancelled. Raises what went wrong in here or in ``listen``'s callback."""
        await run_async(self.live(), self._perform)

    async def flush(self, timeout_s: float) -> bool:
        """Wait until the store has the newest member record; False if that takes longer."""
        return await run_async(self.until_written(timeout_s), self._perform)

    async def status(self) -> Waiting:
        """Read what the coordinator waits for; without a reason if it cannot be read."""
        return await run_async(self.read_status(), self._perform)

    async def _perform(self, effect: Effect[Any]) -> Any:
        match effect:
            case Call():
                return await in_time(effect.request.perform(effect.connection), effect.timeout_s)
            case Wait():
                return await _wait(effect.signal, effect.timeout_s)
            case Sleep():
                await asyncio.sleep(effect.seconds)
            case BackOff():
                await asyncio.sleep(random.uniform(0.0, effect.most_s))
            case UntilOneEnds():
                await until_one_ends(*(run_async(part, self._perform) for part in effect.parts))
            case Connect():
                return await in_time(self._dialer.connect(), DIAL_TIMEOUT_S)
            case OfferBootstrap():
                address = effect.local_address
                return await run_abandonable(
                    lambda: self._dialer.offer_bootstrap(address),
                    2 * BOOTSTRAP_TIMEOUT_S,
                    too_late=lambda late: late.close(),
                )
            case DialBootstrap():
                store = effect.address
                await run_abandonable(
                    lambda: self._dialer.dial_bootstrap(store, BOOTSTRAP_TIMEOUT_S), 2 * BOOTSTRAP_TIMEOUT_S
                )
            case _:
                raise NotImplementedError(effect)
        return None


def _log_warning(message: str, reason: str) -> None:
    get_logger().warning(message, reason=reason)


async def _wait(signal: Signal, timeout_s: float | None) -> bool:
    woken = asyncio.get_running_loop().create_future()

    def wake() -> None:
        if not woken.done():
            woken.set_result(None)

    try:
        if not signal.on_set(wake):
            async with asyncio.timeout(timeout_s):
                await woken
    except TimeoutError:
        pass
    finally:
        signal.on_set(None)
    return signal.take()
