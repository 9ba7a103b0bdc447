"""Notices in the event journal."""

from __future__ import annotations

from typing import Any

from elastic_agent.testing.mistakes import noticed

NOTICE = {"event": "notice", "generation": 0, "cause": "operator"}
STOP = {"event": "stop", "cause": "operator"}
DRAIN = {"event": "drain", "node": "node-b", "reason": "maintenance"}


def plan(generation: int, phase: str = "running") -> dict[str, Any]:
    return {"event": "plan", "generation": generation, "phase": phase}


def test_a_notice_that_the_workers_received_counts() -> None:
    assert noticed([plan(0), STOP, NOTICE]) == {0: "operator"}


def test_a_request_counts_although_the_workers_were_stopped_before_their_node_read_the_notice() -> None:
    assert noticed([plan(0), plan(3), STOP, plan(3, "stopped")]) == {3: "operator"}
    assert noticed([plan(3), DRAIN, plan(4, "forming")]) == {3: "drain"}


def test_a_request_between_two_generations_concerns_neither() -> None:
    assert noticed([plan(3), plan(4, "forming"), DRAIN, plan(4)]) == {}
