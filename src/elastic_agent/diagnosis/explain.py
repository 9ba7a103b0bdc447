"""Explains why a generation failed, as the agents log it and `elastic-agent why` prints it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec.structs import replace

from elastic_agent.protocol import Plan, World

from .records import NodeReport
from .render import render
from .root_cause import root_cause


def explain(world: World, plan: Plan, reports: Mapping[str, NodeReport], shown_tail: str = "") -> str:
    """A few lines of text; empty if nothing is known to have failed.

    Args:
        world: the generation's.
        plan: the plan that ended it.
        reports: of its nodes, by node id; some may be missing.
        shown_tail: the end of a worker's output that was shown already, and is left out.
    """
    cause = root_cause(reports.values(), plan, world)
    if cause is None:
        return ""
    if shown_tail and _last_line(cause.tail) == _last_line(shown_tail):
        cause = replace(cause, tail="")
    return render(cause)


def _last_line(text: str) -> str:
    """The error itself, if the text is a traceback."""
    return next((line for line in reversed(text.splitlines()) if line.strip()), "")
