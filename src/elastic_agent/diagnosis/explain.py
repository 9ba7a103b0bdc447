"""Explains why a generation failed, as the agents log it and `elastic-agent why` prints it. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from elastic_agent.protocol import Plan, World

from .records import NodeReport
from .render import render
from .root_cause import root_cause


def explain(world: World, plan: Plan, reports: Mapping[str, NodeReport]) -> str:
    """At most 20 lines of text; empty if nothing is known to have failed.

    Args:
        world: the generation's.
        plan: the plan that ended it.
        reports: of its nodes, by node id; some may be missing.
    """
    cause = root_cause(reports.values(), plan, world)
    return render(cause) if cause is not None else ""
