"""Trainings of Lightning and transformers that continue from copies in memory, and read no checkpoint."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.faults.cluster import Cluster
from tests.integrations import test_lightning, test_transformers
from tests.integrations.worlds import first_step, history, steps_of

OPTIONS = ("--survive", "memory")
SAVE_AT = 3
SAVED = ("--save-at", str(SAVE_AT))
"""The only checkpoint: without one, a training is not continued."""
STEPS = 40
"""A step takes 40 ms or more. Eleven are measured, and a copy is due a second later, so at the 36th at the latest."""
SEQUENCES = 3000

pytestmark = pytest.mark.system


def start_lightning(cluster: Cluster, name: str, slots: int) -> None:
    arguments = ("--folder", str(cluster.folder), "--samples", str(test_lightning.SAMPLES), *SAVED)
    cluster.start(name, slots, script=test_lightning.SCRIPT, arguments=arguments)


def start_transformers(cluster: Cluster, name: str, slots: int) -> None:
    arguments = (
        "--samples",
        str(SEQUENCES),
        "--epochs",
        "1",
        "--save-steps",
        "1000000",
        "--batch-size",
        "4",
        *SAVED,
    )
    folder, same = ("--folder", str(cluster.folder)), ("--samples-per-step", "12", "--no-dropout")
    cluster.start(
        name,
        slots,
        script=test_transformers.SCRIPT,
        arguments=(*folder, *arguments, *same),
        HF_HUB_OFFLINE="1",
    )


@pytest.mark.parametrize("start", [start_lightning, start_transformers])
def test_training_continues_from_memory_also_on_a_machine_that_has_lost_its_own(
    start: object, tmp_path: Path
) -> None:
    assert callable(start)
    is_lightning = start is start_lightning
    with Cluster(tmp_path, "2", OPTIONS) as cluster:
        start(cluster, "a", 2)
        start(cluster, "b", 1)
        first = cluster.wait_training("a", "b", steps=STEPS)
        os.kill(cluster.pid_of("a/1"), signal.SIGKILL)

        second = cluster.wait_training("a", "b", after=first, steps=STEPS)
        check_goes_on(cluster, first, second)
        cluster.agents["b"].signal(signal.SIGKILL)
        start(cluster, "b", 1)

        third = cluster.wait_training("a", "b", after=second)
        check_goes_on(cluster, second, third)
        cluster.wait_said("a", "from the memory of 2 of 3 workers")
        cluster.let_finish()
        assert cluster.wait_end() == {"a": ExitCode.FINISHED, "b": ExitCode.FINISHED}
        if is_lightning:
            test_lightning.check_each_sample_once(cluster)
            test_lightning.check_same_as_one_process(cluster)
            return
        used = Counter(sample for ranks in history(cluster) for line in ranks for sample in line["ids"])
        assert set(used) == set(range(SEQUENCES))
        losses = test_transformers.loss_of_steps(cluster)
    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", "1", ()) as undisturbed:
        undisturbed.let_finish()
        start(undisturbed, "a", 1)
        assert undisturbed.wait_end() == {"a": ExitCode.FINISHED}, undisturbed.story()
        assert losses == pytest.approx(test_transformers.loss_of_steps(undisturbed), abs=1e-4)


def check_goes_on(cluster: Cluster, ended: int, begun: int) -> None:
    """Check that a generation continues after a step of the one before, and not after the checkpoint."""
    least = max(SAVE_AT + 1, first_step(cluster, ended))
    ends = max(line["step"] for line in steps_of(cluster, ended))
    assert least < first_step(cluster, begun) <= ends + 1, cluster.story()
