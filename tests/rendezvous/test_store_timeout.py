"""How long an agent dials a store that does not answer."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from elastic_agent.rendezvous.events import Connected, Disconnected, Unusable
from elastic_agent.rendezvous.participant import StoreTimeout

CONNECTED = Connected("s", replaced=False)
LOST = Disconnected("no route to host")
UNUSABLE = Unusable("not a store")


class Dialling:
    """An agent that dials for at most 30 s."""

    def __init__(self) -> None:
        self.reasons: list[str] = []
        self.timers: list[Callable[[], None]] = []
        self.timeout = StoreTimeout(30.0, self.call_later, self.reasons.append)

    def call_later(self, after_s: float, act: Callable[[], None]) -> None:
        assert after_s == 30.0
        self.timers.append(act)


@pytest.fixture
def dialling() -> Dialling:
    return Dialling()


def test_an_agent_gives_up_after_join_timeout_without_an_answer(dialling: Dialling) -> None:
    dialling.timeout.take_in(LOST)
    dialling.timeout.take_in(Disconnected("another reason"))
    assert len(dialling.timers) == 1, "the time counts from the first attempt"
    assert dialling.reasons == []
    dialling.timers[0]()
    assert dialling.reasons == ["the store did not answer for 30 s: another reason"], (
        "the newest, for its remedy"
    )


def test_the_timeout_restarts_with_each_loss_of_the_store(dialling: Dialling) -> None:
    for event in (LOST, CONNECTED, LOST):
        dialling.timeout.take_in(event)
    first, second = dialling.timers
    first()
    assert dialling.reasons == []
    second()
    assert len(dialling.reasons) == 1


def test_an_unusable_store_is_given_up_at_once(dialling: Dialling) -> None:
    dialling.timeout.take_in(UNUSABLE)
    assert dialling.reasons == ["not a store"]


def test_a_store_that_worked_before_is_dialled_again(dialling: Dialling) -> None:
    """Its machine may have been restarted, and listens with other programs first."""
    for event in (CONNECTED, UNUSABLE, CONNECTED):
        dialling.timeout.take_in(event)
    dialling.timers[0]()
    assert dialling.reasons == []
