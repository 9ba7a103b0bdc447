"""The name by which agents tell the function of one launch from that of another."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest

from elastic_agent.launcher.agent_process import _full_name


def train(rate: float = 0.1) -> float:
    return rate


class Training:
    def __call__(self) -> None:
        return None


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda: train, "train"),
        (lambda: functools.partial(functools.partial(train), rate=0.2), "train"),
        (Training, "Training"),
    ],
)
def test_a_function_has_the_same_name_at_every_start(
    make: Callable[[], Callable[..., Any]], name: str
) -> None:
    assert _full_name(make()) == _full_name(make()) == f"{__name__}:{name}"
