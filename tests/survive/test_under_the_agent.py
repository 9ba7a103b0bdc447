"""The example under real agents."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, clean_environment, elastic_agent
from tests.faults.cluster import SHORT_LEASE_S, SHORT_MARGIN_S, Cluster

EXAMPLE = Path(__file__).parents[2] / "examples" / "survive_ddp.py"

pytestmark = pytest.mark.system


def losses(output: str) -> list[tuple[int, str]]:
    """The step and the loss of each line that rank 0 printed."""
    return [(int(step), loss) for step, loss in re.findall(r"^step=(\d+) loss=(\S+)$", output, re.M)]


def test_a_training_that_fails_on_all_ranks_goes_on_from_memory(tmp_path: Path) -> None:
    def run(name: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        folder = tmp_path / name
        folder.mkdir()
        options = ("--state-dir", str(folder), "--nproc-per-node", "2")
        return elastic_agent(
            *options,
            str(EXAMPLE),
            "--steps",
            "30",
            "--checkpoint-dir",
            str(folder),
            *arguments,
            variables=LONG_LEASE,
        )

    undisturbed = run("undisturbed")
    failed = run("failed", "--fail-at", "15", "--checkpoint-every", "1000")
    assert failed.returncode == undisturbed.returncode == 0, failed.stdout + failed.stderr
    assert [step for step, _ in losses(failed.stdout)] == list(range(1, 31))
    assert losses(failed.stdout) == losses(undisturbed.stdout)
    assert "elastic_agent.survive: resumed at step 15 from the memory of 2 of 2 workers" in failed.stderr
    assert not list((tmp_path / "failed").glob("*.pt"))  # there was no checkpoint
    assert "elastic_agent.survive" not in undisturbed.stderr


@pytest.mark.prove
def test_a_node_that_is_left_has_the_state(tmp_path: Path) -> None:
    with Cluster(tmp_path, "1:2", lease_s=SHORT_LEASE_S, margin_s=SHORT_MARGIN_S) as cluster:
        arguments = ("--steps", "100000", "--checkpoint-every", "1000000", "--checkpoint-dir")
        for node in ("a", "b"):
            (tmp_path / node).mkdir()
            own = (*arguments, str(tmp_path / node))
            cluster.start(node, state=f"state-{node}", script=EXAMPLE, arguments=own)
        a, b = cluster.agents.values()

        def printed() -> int:
            return len(losses(a.said()) + losses(b.said()))

        cluster.wait("a world of both", lambda: any(len(cluster.world(g)) == 2 for g in cluster.worlds()))
        before = printed()
        cluster.wait("steps of both", lambda: printed() > before + 50)
        b.kill_node()
        resumed = cluster.wait(
            "the next world",
            lambda: re.search(r"resumed at step (\d+) from the memory of 1 of 1 workers", a.said()),
        )
        cluster.wait("a step", lambda: losses(a.said()[resumed.end() :]))
        assert losses(a.said()[resumed.end() :])[0][0] == int(resumed[1]) + 1
        assert int(resumed[1]) > 0


@pytest.mark.prove
def test_the_example_runs_under_torchrun_and_plain_python(tmp_path: Path) -> None:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    for command, first in (([sys.executable], 1), (torchrun, 11)):
        arguments = [str(EXAMPLE), "--steps", str(first + 9), "--checkpoint-dir", str(tmp_path)]
        environ = clean_environment({"ELASTIC_AGENT_RUN_ID": "example", "OMP_NUM_THREADS": "1"})
        done = subprocess.run(
            [*command, *arguments, "--checkpoint-every", "10"], env=environ, capture_output=True, text=True
        )
        assert done.returncode == 0, done.stderr
        assert [step for step, _ in losses(done.stdout)] == list(range(first, first + 10))
        assert "elastic_agent.survive" not in done.stderr
