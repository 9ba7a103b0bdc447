"""Drivers yield effects; a runner performs them and sends the answers back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from itertools import islice
from typing import Any

import pytest

from elastic_agent.rendezvous.asyncio_runner import run_async
from elastic_agent.rendezvous.effects import Effect, Steps, back_offs


@dataclass(frozen=True)
class Read(Effect[int]):
    """A number of this name."""

    name: str


def add(*names: str) -> Steps[int]:
    """The sum; what cannot be read counts as 100."""
    total = 0
    for name in names:
        try:
            total += yield from Read(name)
        except OSError:
            total += 100
    return total


async def perform(effect: Effect[Any]) -> Any:
    assert isinstance(effect, Read)
    if effect.name == "missing":
        raise OSError(effect.name)
    return {"one": 1, "two": 2}[effect.name]


def run(steps: Steps[int]) -> int:
    return asyncio.run(run_async(steps, perform))


def test_answers_are_sent_back_and_the_result_is_returned() -> None:
    assert run(add("one", "two")) == 3


def test_a_driver_sees_the_error_of_an_effect_where_it_yielded_it() -> None:
    assert run(add("one", "missing", "two")) == 103


def test_an_error_that_the_driver_does_not_handle_ends_it() -> None:
    with pytest.raises(KeyError, match="three"):
        run(add("one", "three"))


def test_back_offs_double_up_to_the_longest() -> None:
    assert [*islice(back_offs(0.5, 3.0), 5)] == [0.5, 1.0, 2.0, 3.0, 3.0]
    assert next(islice(back_offs(0.5, 3.0), 5000, None)) == 3.0
