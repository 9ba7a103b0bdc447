"""What the integration changes in transformers, and when; and what of transformers it relies on."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from elastic_agent.integrations.transformers import private_names
from elastic_agent.workers.guard.cold import with_startup_hook
from tests.client.support import AGENT_ENVIRONMENT, launched, run_script

COLD = """
import torch
from transformers import GPT2Config, GPT2LMHeadModel, Trainer, TrainingArguments
from elastic_agent.integrations.transformers import ElasticCallback

print("adapted:", hasattr(Trainer.train, "__wrapped__"))
model = GPT2LMHeadModel(GPT2Config(vocab_size=8, n_positions=4, n_embd=8, n_layer=1, n_head=1))
tokens = torch.tensor([1, 2, 3])
settings = dict(per_device_train_batch_size=2, max_steps=2, report_to="none", use_cpu=True)
data = [{"input_ids": tokens, "labels": tokens}] * 8
trainer = Trainer(
    model, TrainingArguments("made", **settings), train_dataset=data, callbacks=[ElasticCallback()]
)
trainer.train()
mine = [callback for callback in trainer.callback_handler.callbacks if isinstance(callback, ElasticCallback)]
print("callbacks:", len(mine), "samples:", mine[0].position.sampler.samples_finished)
"""


@pytest.mark.prove
def test_a_cold_worker_adapts_transformers_and_keeps_a_callback_of_the_script(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(COLD)
    worker = {name: value for name, value in AGENT_ENVIRONMENT.items() if name.startswith("ELASTIC_AGENT_")}
    worker |= {"TORCHELASTIC_RUN_ID": "digits", "RANK": "0"}
    worker["ELASTIC_AGENT_TRANSFORMERS_DISABLE"] = "resume,sampels"
    done = run_script(tmp_path / "train.py", with_startup_hook(launched(worker)), cwd=tmp_path)
    assert done.stdout.startswith("adapted: True\n"), done.stderr
    assert done.stdout.endswith("callbacks: 1 samples: 4\n"), done.stderr
    assert "'resume,sampels': no such feature: sampels; expected a comma-separated list of" in done.stderr


OTHER_VERSIONS = """
import json, os, sys
import transformers.trainer
from elastic_agent.integrations.transformers import install, private_names

Trainer = transformers.trainer.Trainer
features = frozenset(private_names.Feature)
unfit = private_names.PATCHES.misfits("transformers", features, read_source=True)
print(json.dumps([hasattr(Trainer.train, "__wrapped__"), transformers.__version__, unfit]), flush=True)
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
os._exit(0)  # to free all that is imported takes seconds
"""
FOR_SAMPLES = {
    "_get_train_sampler",
    "_init_training_state",
    "_inner_training_loop",
    "_run_epoch",
    "set_initial_training_values",
}
FOR_RESUME = {"train", "_finalize_training"}
FOR_MEMORY = {
    "_maybe_log_save_evaluate",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
}


def test_the_private_names_exist_and_another_version_is_adapted_in_whole_features() -> None:
    changes = ["0", "del Trainer._run_epoch", "Trainer._finalize_training = id", "del Trainer.train"]
    done = run_script(
        OTHER_VERSIONS,
        {"ELASTIC_AGENT_GENERATION": "1", "ELASTIC_AGENT_TRAINER_MEMORY": "1", "RANK": "0"},
        *changes,
    )
    adapted, version, misfits = json.loads(done.stdout.splitlines()[0])
    assert not adapted, "plain Python"
    told = "adapt elastic_agent/integrations/transformers/private_names.py to this transformers, and TESTED"
    assert (version, misfits) == (private_names.TESTED, {}), told
    found = [json.loads(line) for line in done.stdout.splitlines()[1:]]
    assert [(in_force, {*replaced}) for in_force, replaced in found] == [
        (["memory", "notices", "resume", "samples", "steps"], FOR_SAMPLES | FOR_RESUME | FOR_MEMORY),
        (["memory", "notices", "resume", "steps"], FOR_RESUME | FOR_MEMORY),
        (["memory", "notices", "samples", "steps"], FOR_SAMPLES | FOR_MEMORY | {"train"}),
        ([], set()),
    ]
    told = [line for line in done.stderr.splitlines() if line.startswith("elastic_agent: ")]
    differs = "elastic_agent: transformers 5.24.0 differs from 5.23.0, so that these features are left out: "
    assert told == [
        f"{differs}samples: Trainer._run_epoch no longer exists",
        f"{differs}resume: the source of Trainer._finalize_training is not there",
        f"{differs}all: Trainer.train no longer exists",
    ]
