"""Hangs without heartbeats: the agents name the worker that the others wait for, and restart the workers."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import elastic_agent

from .conftest import MakeCluster

pytestmark = [pytest.mark.system, pytest.mark.prove]

HANGING = Path(__file__).parent / "hanging.py"

EXPECTED = {
    "elsewhere": "worker b/1 (rank 3) is one all_reduce behind: 1 MB, sequence number 11, called by ranks 0-2, 4-5 at "
    "hanging.py:{ALL}; it is at hanging.py:{HERE}",
    "stopped": "worker b/1 (rank 3) is stopped by a signal",
    "finally": "worker b/1 (rank 3) waits in barrier at hanging.py:{FINALLY} while it handles ValueError: loss is NaN "
    "(hanging.py:{RAISED}); ranks 0-2, 4-5 wait for it at hanging.py:{ALL}",
    "mismatch": "worker b/1 (rank 3) called reduce of 1 MB",
    "uneven": "worker b/1 (rank 3) called barrier",
    "loader": "it waits for its data loader at hanging.py:",
}


def test_each_kind_of_hang_is_attributed_to_the_right_worker_and_line(make_cluster: MakeCluster) -> None:
    cluster = make_cluster("3", "--hang-timeout", "3", "--max-restarts", "9")
    nodes, kinds = ("a", "b", "c"), (*EXPECTED, "exits", "none")
    cluster.start_host("a", 2, script=HANGING, arguments=kinds)
    for node in nodes[1:]:
        cluster.start(node, 2, script=HANGING, arguments=kinds)
    assert cluster.wait_end(*nodes) == dict.fromkeys(nodes, 0)

    lines = {
        mark: number
        for number, line in enumerate(HANGING.read_text().splitlines(), 1)
        for mark in ("HERE", "ALL", "FINALLY", "RAISED")
        if line.endswith(f"# {mark}")
    }
    for generation, kind in enumerate(EXPECTED, 1):
        words = EXPECTED[kind].format(**lines)
        for node in nodes:
            told = cluster.agents[node].lines(
                f"generation {generation}: root cause: ", "made no progress for", words
            )
            assert told, (kind, node)

    early = kinds.index("exits") + 1
    for node in nodes:
        (cause,) = cluster.agents[node].lines(f"generation {early}: root cause: ")
        assert "worker b/1 (rank 3)" in cause
        # By their broken connections, or by the hang if a busy machine takes longer than --hang-timeout to end them.
        assert "exited with code 0" in cause

    told = elastic_agent(
        "why", str(cluster.run_id), "--generation", "1", "--state-dir", str(cluster.folder / "state")
    ).stdout
    assert EXPECTED["elsewhere"].format(**lines) in told
    assert "where the workers were:" in told, told
    assert f"hanging.py:{lines['HERE']} in " in told, "the stack of another node's worker"
