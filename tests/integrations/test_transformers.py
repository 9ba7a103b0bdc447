"""Unmodified scripts with the Trainer of transformers in worlds that change."""

from __future__ import annotations

import itertools
import json
import os
import signal
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.records import Line
from tests.client.support import launched
from tests.conformance.launchers import BARE, COLD, Job, run_everywhere
from tests.faults.cluster import Cluster

SCRIPT = Path(__file__).parent / "transformers_train.py"
SAMPLES = 1001
OPTIONS = ("--preload", "transformers.trainer,accelerate")
"""What others test; it would take most of the time."""
CONSTANT = ("--batch-size", "1", "--samples-per-step", "12", "--no-dropout")
ARGUMENTS = ("--samples", str(SAMPLES), "--epochs", "1", "--batch-size", "2", "--save-steps", "20")

pytestmark = [pytest.mark.faults, pytest.mark.timeout(300)]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    with Cluster(tmp_path, "1:4", OPTIONS) as made:
        yield made


def start(cluster: Cluster, name: str, slots: int, *more: str) -> None:
    arguments = ("--folder", str(cluster.folder), *ARGUMENTS, *more)
    start_agent = cluster.start if cluster.agents else cluster.start_host
    start_agent(name, slots, script=SCRIPT, arguments=arguments, HF_HUB_OFFLINE="1")


def steps_of(cluster: Cluster, generation: int) -> list[Line]:
    return [one for one in cluster.steps() if one["generation"] == generation]


def ids(lines: list[Line]) -> list[int]:
    return [sample for line in lines for sample in line["ids"]]


def losses(cluster: Cluster) -> dict[tuple[int, int], list[float]]:
    """Of each step and rank, the last time that it was taken."""
    return {(line["step"], line["rank"]): line["losses"] for line in cluster.steps()}


def loss_of_steps(cluster: Cluster) -> dict[int, float]:
    """The mean over all samples of each step, from 1 on."""
    by_step: dict[int, list[Line]] = {}
    for line in cluster.steps():
        by_step.setdefault(line["step"], []).append(line)
    return {step: sum(sum(one["losses"]) for one in ranks) / len(ranks) for step, ranks in by_step.items()}


@pytest.mark.slow
@pytest.mark.rotates(2)
def test_an_epoch_with_five_membership_changes_uses_each_sample_once_with_the_losses_of_one_worker(
    cluster: Cluster, tmp_path: Path
) -> None:
    start(cluster, "a", 1, *CONSTANT)
    start(cluster, "b", 2, *CONSTANT)
    generation = cluster.wait_training("a", "b", steps=3)
    generations = [generation]
    for joins, leaves in (("c", ""), ("", "b"), ("b", ""), ("", "c"), ("", "b")):
        if joins:
            start(cluster, joins, {"b": 2, "c": 1}[joins], *CONSTANT)
        else:
            cluster.agents[leaves].terminate()
            assert cluster.wait_end(leaves)[leaves] == ExitCode.DRAINED, cluster.story()
            del cluster.agents[leaves]
        generation = cluster.wait_training(*sorted(cluster.agents), after=generation, steps=3)
        generations.append(generation)
    cluster.let_finish()
    assert cluster.wait_end() == {"a": ExitCode.FINISHED}, cluster.story()

    # All ranks left after the same step, and the next generation took the next one.
    for before, after in itertools.pairwise(generations):
        last = {one["rank"]: one["step"] for one in steps_of(cluster, before)}
        assert len({*last.values()}) == 1, cluster.story()
        assert {one["step"] for one in steps_of(cluster, after)} >= {last[0] + 1}
        assert min(one["step"] for one in steps_of(cluster, after)) == last[0] + 1
    # The last generation has one worker: no padding at the end of the epoch.
    times = Counter(ids(cluster.steps()))
    assert set(times) == set(range(SAMPLES))
    assert set(times.values()) == {1}
    final = cluster.steps()[-1]
    assert (final["epoch"], final["step"]) == (1, final["of"])
    assert {one["restarts"] for one in cluster.born()} == {0}

    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", "1", OPTIONS) as undisturbed:
        undisturbed.let_finish()
        start(undisturbed, "a", 1, *CONSTANT)
        assert undisturbed.wait_end() == {"a": ExitCode.FINISHED}, undisturbed.story()
    assert loss_of_steps(cluster) == pytest.approx(loss_of_steps(undisturbed), abs=1e-4)


@pytest.mark.slow
@pytest.mark.rotates(2)
def test_stopped_and_crashed_training_continues_with_the_same_losses_and_samples(
    cluster: Cluster, tmp_path: Path
) -> None:
    (tmp_path / "undisturbed").mkdir()
    with Cluster(tmp_path / "undisturbed", "1", OPTIONS) as undisturbed:
        undisturbed.let_finish()
        start(undisturbed, "a", 3)
        assert set(undisturbed.wait_end().values()) == {ExitCode.FINISHED}, undisturbed.story()
        expected = losses(undisturbed)

    start(cluster, "a", 2)
    start(cluster, "b", 1)
    first = cluster.wait_training("a", "b")
    cluster.agents["b"].signal(signal.SIGUSR1)
    assert set(cluster.wait_end().values()) == {ExitCode.STOPPED}, cluster.story()
    start(cluster, "a", 2)
    start(cluster, "b", 1)
    second = cluster.wait_training("a", "b", after=first, steps=25)
    os.kill(cluster.pid_of("b/0"), signal.SIGKILL)
    third = cluster.wait_training("a", "b", after=second)
    cluster.agents["a"].signal(signal.SIGUSR1)
    assert set(cluster.wait_end().values()) == {ExitCode.STOPPED}, cluster.story()
    same_world = losses(cluster)
    assert same_world == {key: expected[key] for key in same_world}
    saved = max(one["step"] for one in steps_of(cluster, third))

    cluster.let_finish()
    start(cluster, "a", 1)
    start(cluster, "b", 1)
    assert set(cluster.wait_end().values()) == {ExitCode.FINISHED}, cluster.story()
    fourth = cluster.steps()[-1]["generation"]
    assert {one["rank"] for one in steps_of(cluster, fourth)} == {0, 1}
    assert min(one["step"] for one in steps_of(cluster, fourth)) == saved + 1

    restored = min(one["step"] for one in steps_of(cluster, third)) - 1
    assert restored % 20 == 0
    lost = ids([one for one in steps_of(cluster, second) if one["step"] > restored])
    assert lost
    times = Counter(ids(cluster.steps()))
    times.subtract(lost)
    assert set(times) == set(range(SAMPLES))
    # 1,001 is odd: at the end of the epoch, Accelerate fills the last batches of two workers.
    assert sum(times.values()) - SAMPLES < 4
    assert max(times.values()) <= 2


ADAPTED = """
import json, os, torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from elastic_agent.integrations.patching import misfits
from elastic_agent.integrations.transformers import ElasticCallback, private_names

unfit = misfits("transformers", private_names.PATCHES, read_source=True)
print("adapted:", hasattr(Trainer.train, "__wrapped__"), private_names.TESTED, "misfits:", unfit)
if hasattr(Trainer.train, "__wrapped__"):
    model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
    tokens = torch.tensor([1, 2, 3])
    settings = dict(per_device_train_batch_size=2, max_steps=2, report_to="none", use_cpu=True)
    data = [{"input_ids": tokens, "labels": tokens}] * 8
    trainer = Trainer(
        model, TrainingArguments("made", **settings), train_dataset=data, callbacks=[ElasticCallback()]
    )
    trainer.train()
    mine = [one for one in trainer.callback_handler.callbacks if isinstance(one, ElasticCallback)]
    print("callbacks:", len(mine), "samples:", mine[0].position.sampler.samples_finished)
"""


def test_a_cold_worker_adapts_transformers_and_keeps_a_callback_of_the_script_and_plain_python_does_not(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(ADAPTED)
    variables = {"ELASTIC_AGENT_TRANSFORMERS_DISABLE": "resume,sampels"}
    outcomes = run_everywhere(Job("train.py", cwd=tmp_path, variables=variables), tmp_path, [BARE, COLD])
    plain, cold = (outcomes[one.name].worker(0, 0) for one in (BARE, COLD))
    assert plain.stdout == b"adapted: False 5.23.0 misfits: {}\n", plain.stderr
    assert cold.stdout.startswith(b"adapted: True 5.23.0 misfits: {}\n"), cold.stderr
    assert cold.stdout.endswith(b"callbacks: 1 samples: 4\n"), cold.stderr
    assert b"'resume,sampels': no such feature: sampels; expected a comma-separated list of" in cold.stderr


OTHER_VERSIONS = """
import json, os, sys
import transformers.trainer
from elastic_agent.integrations.transformers import install

Trainer = transformers.trainer.Trainer
transformers.__version__ = "5.24.0"
for change in sys.argv[1:]:
    if os.fork() == 0:
        exec(change)
        before = dict(vars(Trainer))
        in_force = sorted(install())
        replaced = sorted(name for name in vars(Trainer) if vars(Trainer)[name] is not before.get(name))
        print(json.dumps([in_force, replaced]), flush=True)
        os._exit(0)
    os.wait()
"""
FOR_SAMPLES = {
    "_get_train_sampler",
    "_init_training_state",
    "_inner_training_loop",
    "_run_epoch",
    "set_initial_training_values",
}
FOR_RESUME = {"train", "_finalize_training"}


def test_another_version_is_adapted_in_whole_features() -> None:
    changes = ["0", "del Trainer._run_epoch", "Trainer._finalize_training = id", "del Trainer.train"]
    done = subprocess.run(
        [sys.executable, "-c", OTHER_VERSIONS, *changes],
        env=launched({"ELASTIC_AGENT_GENERATION": "1", "RANK": "0"}),
        capture_output=True,
        text=True,
        timeout=150,
    )
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [(in_force, {*replaced}) for in_force, replaced in found] == [
        (["notices", "resume", "samples", "steps"], FOR_SAMPLES | FOR_RESUME),
        (["notices", "resume", "steps"], FOR_RESUME),
        (["notices", "samples", "steps"], FOR_SAMPLES | {"train"}),
        ([], set()),
    ]
    told = [line for line in done.stderr.splitlines() if line.startswith("elastic_agent: ")]
    differs = "elastic_agent: transformers 5.24.0 differs from 5.23.0, so that these features are left out: "
    assert told == [
        f"{differs}samples: Trainer._run_epoch no longer exists",
        f"{differs}resume: the source of Trainer._finalize_training is not there",
        f"{differs}all: Trainer.train no longer exists",
    ]
