"""What the coordinator tells the nodes of its waiting."""

from __future__ import annotations

import pytest

from elastic_agent.protocol import Waiting
from elastic_agent.protocol.codec import MAX_REASON_CHARS, waiting_in, waiting_text


@pytest.mark.parametrize("lacks_nodes", [False, True])
def test_it_is_read_as_it_was_told(lacks_nodes: bool) -> None:
    waiting = Waiting(
        'waiting for 2 more nodes (at least 3 required); joined: "größe" (1 worker)', lacks_nodes
    )
    assert waiting_in(waiting_text(waiting)) == waiting


def test_the_nodes_that_have_joined_are_told_unless_they_are_too_many() -> None:
    few, many = (tuple(f"n{number}" for number in range(nodes)) for nodes in (40, 4000))
    assert waiting_in(waiting_text(Waiting("waiting", True, few))) == Waiting("waiting", True, few)
    assert waiting_in(waiting_text(Waiting("waiting", True, many))) == Waiting("waiting", True)


def test_a_reason_is_one_short_line_of_printable_text() -> None:
    told = waiting_text(Waiting("\x1b[2J\n" + '"' * 10_000 + "\udcff"))
    assert len(told) < 2048, "as much as a store keeps"
    assert waiting_in(told).reason == " [2J " + '"' * (MAX_REASON_CHARS - 5)
