"""The driver of the election: when an agent leads, and when it knows that it does not any more."""

from __future__ import annotations

from typing import cast

import pytest

from elastic_agent.rendezvous.backends.etcd.election import keep_leading
from elastic_agent.rendezvous.waits import Signal
from elastic_agent.transport.base import StoreLostError
from elastic_agent.transport.etcd import Leadership, NotLeaderError
from tests.loop_thread import finished

TTL_S = 4.0


class GivenUpError(Exception):
    """The task that keeps the leader key alive is cancelled."""


class LeaderKey(Signal):
    """A leader key, and a clock that only waiting for the signal to write a mark moves."""

    ttl_s = TTL_S

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 1000.0
        self.marks_due: list[float] = []
        self.marks: list[float] = []
        self.kept: list[float] = []
        self.given_up_s = 1100.0
        self.etcd_answers_until_s = 1e9
        self.answer_takes_s = 0.0
        self.answer: bool | NotLeaderError = True
        """To the request to keep the key alive."""

    def keep(self, elected_s: float = 1000.0) -> str:
        return finished(keep_leading(cast(Leadership, self), self, lambda: self.now_s, elected_s))

    def keep_until_given_up(self) -> None:
        with pytest.raises(GivenUpError):
            self.keep()

    async def write_mark(self) -> None:
        self._request()
        self.marks.append(self.now_s)

    async def keep_alive(self) -> bool:
        self._request()
        if isinstance(self.answer, NotLeaderError):
            raise self.answer
        self.kept.append(self.now_s)
        return self.answer

    def _request(self) -> None:
        self.now_s += self.answer_takes_s
        if self.now_s > self.etcd_answers_until_s:
            raise StoreLostError("no answer")

    async def wait(self, timeout_s: float | None = None) -> bool:
        assert timeout_s is not None  # the key is to be kept alive
        until_s = self.now_s + timeout_s
        marking = bool(self.marks_due) and self.marks_due[0] <= until_s
        self.now_s = max(self.now_s, self.marks_due.pop(0) if marking else until_s)
        if self.now_s >= self.given_up_s:
            raise GivenUpError
        return marking


@pytest.fixture
def key() -> LeaderKey:
    return LeaderKey()


def test_the_key_is_kept_alive_four_times_in_its_time_and_marks_are_written_at_once(key: LeaderKey) -> None:
    key.marks_due, key.given_up_s = [1000.4, 1000.8, 1001.2], 1004.5
    key.keep_until_given_up()
    assert key.marks == [1000.4, 1000.8, 1001.2]
    assert key.kept == [1001.0, 1002.0, 1003.0, 1004.0]


def test_leadership_is_lost_when_etcd_has_not_answered_for_the_time_of_the_key(key: LeaderKey) -> None:
    key.etcd_answers_until_s = 1003.0
    assert "not renewed: no answer" in key.keep()
    assert key.kept[-1] + TTL_S < key.now_s <= key.kept[-1] + 1.5 * TTL_S


def test_the_time_of_the_key_counts_from_its_request(key: LeaderKey) -> None:
    """The answer may have taken long; etcd counts from before it."""
    key.etcd_answers_until_s = 0.0
    assert "not renewed" in key.keep(elected_s=1000.0 - 0.9 * TTL_S)
    assert key.now_s <= 1000.0 + 0.5 * TTL_S


def test_the_time_of_a_renewal_counts_from_its_request(key: LeaderKey) -> None:
    key.answer_takes_s, key.etcd_answers_until_s = 0.5, 1001.6
    key.keep()
    assert key.kept == [1001.5]
    assert key.now_s <= 1001.0 + 1.5 * TTL_S


@pytest.mark.parametrize("answer", [False, NotLeaderError("b leads")])
def test_leadership_is_lost_at_once_when_etcd_reports_it(
    key: LeaderKey, answer: bool | NotLeaderError
) -> None:
    key.answer = answer
    lost = key.keep()
    assert lost == (
        "b leads" if isinstance(answer, NotLeaderError) else "the coordinator's etcd lease expired"
    )
    assert key.now_s == 1001.0
