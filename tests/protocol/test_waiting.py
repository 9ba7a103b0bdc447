"""What the coordinator tells the nodes of its waiting."""

from __future__ import annotations

import pytest

from elastic_agent.protocol import Waiting
from elastic_agent.protocol.waiting import LONGEST


@pytest.mark.parametrize("lacks_nodes", [False, True])
def test_it_is_read_as_it_was_told(lacks_nodes: bool) -> None:
    waiting = Waiting(
        'waiting for 2 more nodes (at least 3 required); joined: "größe" (1 worker)', lacks_nodes
    )
    assert Waiting.from_text(waiting.to_text()) == waiting


def test_the_nodes_that_have_joined_are_told_unless_they_are_too_many() -> None:
    few, many = (tuple(f"n{number}" for number in range(nodes)) for nodes in (40, 4000))
    assert Waiting.from_text(Waiting("waiting", True, few).to_text()) == Waiting("waiting", True, few)
    assert Waiting.from_text(Waiting("waiting", True, many).to_text()) == Waiting("waiting", True)


def test_a_reason_is_one_short_line_of_printable_text() -> None:
    told = Waiting("\x1b[2J\n" + '"' * 10_000 + "\udcff").to_text()
    assert len(told) < 2048, "as much as a store keeps"
    assert Waiting.from_text(told).reason == " [2J " + '"' * (LONGEST - 5)


@pytest.mark.parametrize(
    "text", ["", "waiting", "{}", "[1]", '{"reason":1}', "[" * 2000, '{"reason":"\\u001b"}']
)
def test_text_of_others_is_at_most_a_reason(text: str) -> None:
    read = Waiting.from_text(text)
    assert read.reason.isprintable()
    assert not read.lacks_nodes
