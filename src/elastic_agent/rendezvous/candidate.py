"""The coordinator of a run in etcd: every agent stands for it, one at a time is it."""

from __future__ import annotations

import contextlib
import math
import os
import platform
import threading
import time
from collections.abc import Callable
from typing import Any

import tenacity

from elastic_agent.logs import get_logger
from elastic_agent.transport.base import TransportError
from elastic_agent.transport.etcd import DeposedError, RunKeys, Term, campaign
from elastic_agent.transport.etcd_client import EtcdClient
from elastic_agent.transport.etcd_plans import UnknownPlanError

from .coordinator_driver import RunDriver
from .coordinator_effects import Publish, RemoveRun, WaitForHints, performer
from .effects import Effect, run
from .memory import RunMemory

PATIENCE_S = 10.0
"""So often a candidate looks whether there is a coordinator, beside hearing at once when it goes."""

RETRY_MIN_S, RETRY_MAX_S = 0.05, 1.0
REST_S = 5.0
"""How long nothing is tried after an internal error."""


class Candidate(threading.Thread):
    """Stands for coordinator of one run until stopped, or until the run is over and everybody knows."""

    def __init__(
        self,
        run_id: str,
        keys: RunKeys,
        dial: Callable[[], EtcdClient],
        memory: RunMemory,
        lease_ttl_s: float,
        on_change: Callable[[], None],
    ) -> None:
        """Prepare; ``start()`` begins.

        Args:
            run_id: the run's name.
            keys: where the run lies in etcd.
            dial: a new connection to a member that answers.
            memory: the disk of this machine.
            lease_ttl_s: of the run's nodes, seconds.
            on_change: called (in this thread) whenever ``winding_up`` may have changed.
        """
        super().__init__(name="elastic-coordinator", daemon=True)
        self._run_id = run_id
        self._keys = keys
        self._dial = dial
        self._memory = memory
        self._lease_ttl_s = lease_ttl_s
        self._on_change = on_change
        self._who = f"{platform.node()}:{os.getpid()}"
        self._stopping = threading.Event()
        self._client: EtcdClient | None = None
        self._term: Term | None = None
        self._over = False
        self._gave_up_for = ""
        """The last reason that was logged."""
        self._log = get_logger().bind(run=run_id)
        self.winding_up = False
        """Whether this agent coordinates a run that is over, but not everybody alive knows."""

    def stop(self) -> None:
        """End; another agent takes over at once. Waits for etcd a second at most."""
        self._stopping.set()
        term, client = self._term, self._client
        if term is not None:
            term.resign()
        if client is not None:
            client.close()

    def mark(self) -> None:
        """This agent's own lease was just renewed (see :meth:`~elastic_agent.transport.etcd.Term.mark`)."""
        term = self._term
        if term is not None:
            term.mark()

    def run(self) -> None:
        """Stand, and stand again when etcd is back."""
        pauses = tenacity.Retrying(
            sleep=self._pause,
            wait=tenacity.wait_random_exponential(multiplier=RETRY_MIN_S, max=RETRY_MAX_S),
            retry=tenacity.retry_if_exception_type(TransportError)
            & tenacity.retry_if_exception(self._goes_on),
        )
        while self._goes_on():
            try:
                pauses(self._stand)
            except (TransportError, tenacity.RetryError):
                return  # stopped meanwhile
            except Exception:
                if self._goes_on():
                    self._log.exception(f"something went wrong while coordinating; again in {REST_S:g} s")
                    self._pause(REST_S)
        self._set_winding_up(False)

    def _goes_on(self, _: BaseException | None = None) -> bool:
        return not self._over and not self._stopping.is_set()

    def _pause(self, length_s: float) -> None:
        self._stopping.wait(length_s)

    def _stand(self) -> None:
        """With one connection; it becomes the term's if this agent is elected."""
        client = self._client = self._dial()
        try:
            while self._goes_on():
                self._term = campaign(client, self._keys, self._who, self._lease_ttl_s, PATIENCE_S)
                if self._term is not None:
                    return self._hold_office(self._term)
        finally:
            client.close()

    def _hold_office(self, term: Term) -> None:
        self._log.debug("this agent coordinates the run")
        try:
            self._coordinate(term)
        except DeposedError as error:
            self._log.info("this agent does not coordinate the run any more", reason=str(error))
        except TransportError as error:
            if self._goes_on() and str(error) != self._gave_up_for:  # it may be so again each second
                self._gave_up_for = str(error)
                level = self._log.error if isinstance(error, UnknownPlanError) else self._log.info
                level("this agent gives up coordinating the run", reason=str(error))
            raise
        finally:
            self._term = None
            term.resign()
            self._set_winding_up(False)

    def _coordinate(self, term: Term) -> None:
        store_born_s = -math.inf
        if term.read_plan() is None:
            self._take_over_ending(term)
            age_s = term.store_age_s()
            store_born_s = time.monotonic() - age_s  # at the latest: the answer took a while
        driver = RunDriver(time.monotonic, self._log, store_born_s=store_born_s)
        on_store_and_disk = performer(self._run_id, term, self._memory)

        def perform(effect: Effect[Any]) -> Any:
            if isinstance(effect, WaitForHints):
                self._set_winding_up(driver.winding_up)
                return self._wait(term, effect.until_s)
            if isinstance(effect, RemoveRun):
                assert effect.ended is not None  # the run is over
                term.remove_run(effect.ended)
                return True
            if isinstance(effect, Publish) and effect.plan.is_terminal:
                # Our own agent must not read the verdict and end before it is known that the run has to be wound up.
                self._set_winding_up(True)
            return on_store_and_disk(effect)

        run(driver.coordinate_until_over(), perform)
        self._over = True

    def _wait(self, term: Term, until_s: float) -> list[str]:
        if self._stopping.is_set():
            raise TransportError("this agent stops coordinating the run")
        return term.wait(max(0.001, until_s - time.monotonic()))

    def _take_over_ending(self, term: Term) -> None:
        """The run has no plan: learn how the last one of its name ended, which this machine may have slept through.

        If etcd does not know either, it is the first of its name, or etcd has lost its data: then a verdict that this
        machine remembers, and of which it does not know that everybody heard it, stands.
        """
        ended = term.read_ended()
        if ended is None:
            return
        with contextlib.suppress(OSError):  # the driver says that the state directory cannot be written
            self._memory.save(self._run_id, ended)

    def _set_winding_up(self, value: bool) -> None:
        if value != self.winding_up:
            self.winding_up = value
            self._on_change()
