"""Agents that claim a name which is taken."""

from __future__ import annotations

import pytest

from .conftest import MakeCluster, on_both
from .rules import see_it_end

pytestmark = [pytest.mark.system, pytest.mark.prove]


@on_both
def test_a_second_agent_with_a_live_nodes_id_is_refused_without_effect_on_the_run(
    make_cluster: MakeCluster,
) -> None:
    cluster = make_cluster("2:3")
    first = cluster.start_training("a", "b")

    here = cluster.start("same-machine", node_id="b")
    elsewhere = cluster.start("other-machine", node_id="b", state="state-of-another-machine")
    assert cluster.wait_end("same-machine", "other-machine") == {"same-machine": 5, "other-machine": 5}
    assert len(here.lines("node id b is in use by another agent on this machine")) == 1
    assert len(elsewhere.lines('"level": "error"')) == 1
    assert elsewhere.lines('"level": "error"', "node id b is held by a living agent")
    for refused in (here, elsewhere):
        assert "Traceback" not in refused.said()

    cluster.wait_steps(5)
    assert {one["generation"] for one in cluster.steps()} == {first}
    see_it_end(cluster, restarts=0, **{"same-machine": 5, "other-machine": 5})
