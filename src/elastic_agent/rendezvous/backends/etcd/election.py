"""The election of a run's coordinator in etcd: every agent takes part, and one at a time leads.

Two drivers without I/O (see :mod:`elastic_agent.rendezvous.effects`). :class:`Election` waits until there is no
leader, campaigns, and then coordinates the run until it is over or leadership is lost; beside it :func:`keep_leading`
keeps the leader key alive. Every write of the leader is a transaction that compares that key, so that a former leader
writes nothing.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from dataclasses import dataclass

from elastic_agent.rendezvous.coordinator_driver import Log, RunDriver
from elastic_agent.rendezvous.coordinator_effects import SaveHistory, StoreCall
from elastic_agent.rendezvous.effects import BackOff, Effect, Request, Sleep, Steps, T_co, back_offs
from elastic_agent.transport import CoordinatorRecords, TransportError, UnknownPlanError
from elastic_agent.transport.etcd import Leadership, NotLeaderError

PATIENCE_S = 10.0
"""How often it is read again whether there is a leader, beside waiting for its key to go."""

RENEWALS_PER_LEADERSHIP = 4
"""How often the leader key is kept alive in its time to live."""

RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
REST_S = 5.0
"""How long nothing is tried after an internal error."""


# -- effects ---------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Connect(Effect[None]):
    """Connect to an etcd member that answers, in place of an earlier connection."""


@dataclass(frozen=True)
class AwaitNoLeader(Effect[str | None]):
    """Wait until the run has nodes and no leader: the life of its records; None if that takes longer."""

    patience_s: float


@dataclass(frozen=True)
class Campaign(Effect[bool]):
    """Create the leader key, unless there is one or the run's records have another life; whether it is ours."""

    life: str


@dataclass(frozen=True)
class Resign(Effect[None]):
    """Delete the leader key if it is ours, so that another agent takes over at once. Raises nothing."""


@dataclass(frozen=True)
class WaitForMark(Effect[bool]):
    """Wait until a mark is to be written (True), or until this time (False)."""

    until_s: float


class LeaderCall(Request[T_co], Effect[T_co]):
    """A call of a method of :class:`Leadership`. Raises NotLeaderError when another agent leads."""

    __slots__ = ()


# -- drivers ---------------------------------------------------------------------------------------


class Election:
    """One agent's part in the election of a run's coordinator, until the run is over."""

    def __init__(self, clock: Callable[[], float], log: Log, *, compares: bool = True) -> None:
        """``clock``: seconds of this machine's clock; ``compares``: whether to warn of nodes that differ."""
        self._clock = clock
        self._compares = compares
        self._log = log
        self._driver: RunDriver | None = None
        """While this agent leads."""
        self._over = False
        self._reported_loss = ""
        """The last reason for giving up that was logged."""

    @property
    def winding_up(self) -> bool:
        """Whether this agent coordinates a run that has its outcome, and whose records it is still to remove."""
        return self._driver is not None and self._driver.winding_up

    def run(self) -> Steps[None]:
        """Take part, again and again, until the run is over."""
        pauses_s = back_offs(RETRY_MIN_S, RETRY_MAX_S)
        while not self._over:
            try:
                yield from self._take_part()
                pauses_s = back_offs(RETRY_MIN_S, RETRY_MAX_S)
            except TransportError:
                yield BackOff(next(pauses_s))
            except OSError as error:
                self._log.warning(
                    "cannot read the run's history in the state directory; not coordinating the run, "
                    f"retrying in {REST_S:g} s",
                    reason=str(error),
                )
                yield Sleep(REST_S)
            except Exception:
                self._log.exception(f"error in the coordinator; retrying in {REST_S:g} s")
                yield Sleep(REST_S)

    def _take_part(self) -> Steps[None]:
        """Over one connection: campaign until elected, and lead until that ends."""
        yield from Connect()
        while True:
            life = yield from AwaitNoLeader(PATIENCE_S)
            if life is not None and (yield from Campaign(life)):
                return (yield from self._lead())

    def _lead(self) -> Steps[None]:
        self._log.debug("this agent is now the coordinator of the run")
        failure: Exception | None = None
        try:
            yield from self._coordinate()
        except Exception as error:
            failure = error
        yield from Resign()
        self._driver = None
        if isinstance(failure, NotLeaderError):
            self._log.info("this agent is no longer the coordinator of the run", reason=str(failure))
        elif failure is not None:
            self._report_loss(failure)
            raise failure

    def _report_loss(self, failure: Exception) -> None:
        """Log why leadership was given up; it may be so again each second."""
        if isinstance(failure, TransportError) and str(failure) != self._reported_loss:
            self._reported_loss = str(failure)
            level = self._log.error if isinstance(failure, UnknownPlanError) else self._log.info
            level("this agent is resigning as the coordinator of the run", reason=str(failure))

    def _coordinate(self) -> Steps[None]:
        plan = yield from StoreCall(CoordinatorRecords.read_plan)
        store_born_s = (yield from self._begin_run()) if plan is None else -math.inf
        self._driver = RunDriver(self._clock, self._log, store_born_s=store_born_s, compares=self._compares)
        yield from self._driver.coordinate_until_over()
        self._over = True

    def _begin_run(self) -> Steps[float]:
        """The run has no plan: read how the last one of its name ended, which this machine may have missed.

        If that is not in etcd either, it is the first of its name, or etcd has lost its data: then an outcome in
        this machine's run history is kept, unless every node is known to have acknowledged it.

        Returns:
            By when at the latest etcd had its data.
        """
        ended = yield from StoreCall(CoordinatorRecords.read_ended)
        if ended is not None:
            with contextlib.suppress(OSError):  # the run's driver logs it
                yield from SaveHistory(ended)
        age_s = yield from LeaderCall(Leadership.store_age_s)
        return self._clock() - age_s  # at the latest: the answer took a while


def keep_leading(clock: Callable[[], float], ttl_s: float, elected_s: float) -> Steps[str]:
    """Keep the leader key alive until leadership is lost. The deadline is our own: etcd may end the key right after.

    Args:
        clock: seconds of this machine's clock.
        ttl_s: for how long the key lives without being kept alive, seconds.
        elected_s: when the key was requested.

    Returns:
        Why leadership is lost.
    """
    renewed_s = sent_s = elected_s
    while True:
        is_marking = yield from WaitForMark(sent_s + ttl_s / RENEWALS_PER_LEADERSHIP)
        try:
            if is_marking:
                yield from LeaderCall(Leadership.write_mark)
            if clock() - sent_s >= ttl_s / RENEWALS_PER_LEADERSHIP:
                sent_s = clock()
                if not (yield from LeaderCall(Leadership.keep_alive)):
                    return "the coordinator's etcd lease expired"
                renewed_s = sent_s
        except NotLeaderError as error:
            return str(error)
        except TransportError as error:
            if clock() - renewed_s > ttl_s:
                return f"the coordinator's etcd lease was not renewed: {error}"
