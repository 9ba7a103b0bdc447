"""Agents of one user authenticate each other with MUNGE; those of other users, and without it, are turned away."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.munge import STRANGER, MungeDaemon, need_munge

from .conftest import MakeCluster
from .rules import see_it_end
from .test_attacks import Attacker, incarnation, undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def daemon() -> Iterator[MungeDaemon]:
    need_munge()
    with MungeDaemon() as running:
        yield running


def test_agents_of_one_user_form_a_run_and_others_do_not_disturb_it(
    make_cluster: MakeCluster, daemon: MungeDaemon
) -> None:
    # Six agents start on this machine meanwhile.
    cluster = make_cluster("2:4", "--secret-source", "munge", "--lease-ttl", "15")
    ours = {"PATH": daemon.path()}
    cluster.serve("server", "--secret-source", "munge", **ours)
    cluster.start("a", **ours)
    cluster.start("b", **ours)
    first = cluster.wait_training("a", "b")

    attacker = Attacker(cluster.port, cluster.run_id)
    attacker.drains(incarnation(cluster, "b"))
    attacker.ends_the_run(sealed=True)
    cluster.start("stranger", PATH=daemon.path(STRANGER))
    cluster.start("without", 1, "--secret-source", "auto")
    cluster.start("no-munge", PATH=os.path.dirname(cluster.agents["a"].process.args[0]))
    ends = cluster.wait_end("stranger", "without", "no-munge")
    turned_away = {"stranger": ExitCode.NO_STORE, "without": ExitCode.NO_STORE, "no-munge": ExitCode.USAGE}
    assert ends == turned_away, cluster.story()
    for name, words in (
        ("stranger", "tells its secret to another user than that of this agent"),
        ("without", "pass the same --secret-source munge to every agent"),
        ("no-munge", "--secret-source munge: cannot start munge on this machine"),
    ):
        assert len(cluster.agents[name].lines(words)) == 1, cluster.story()
    undisturbed(cluster, first)

    cluster.servers["server"].kill_agent()
    cluster.servers["server"].process.wait()
    cluster.start("c", **ours)  # one of the agents hosts the store now, and tells the secret
    cluster.wait_training("a", "b", "c", after=first)
    see_it_end(cluster, restarts=0, **turned_away)
