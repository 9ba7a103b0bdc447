"""What the integration changes in Lightning, and when; and what of Lightning it relies on."""

from __future__ import annotations

import json
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.integrations.lightning import private_names
from elastic_agent.integrations.lightning.private_names import Feature
from tests.client.support import run_script

PROBE = Path(__file__).parent / "lightning_probe.py"


@pytest.fixture(scope="module")
def probe() -> Any:
    """Importing Lightning twice takes seconds: one process finds out everything."""
    return json.loads(run_script(PROBE, {}).stdout.splitlines()[-1])


def test_lightning_finds_the_integration() -> None:
    for package in ("lightning.pytorch", "lightning.fabric", "pytorch_lightning", "lightning_fabric"):
        (entry,) = entry_points(group=f"{package}.callbacks_factory", name="elastic-agent")
        assert callable(entry.load())


def test_this_lightning_has_all_private_names_that_are_used(probe: Any) -> None:
    told = "adapt elastic_agent/integrations/lightning/private_names.py to this Lightning, and TESTED"
    assert probe["misfits"] == [{}, {}, {}, {}], told
    assert probe["version"] == private_names.TESTED, told


def test_without_the_agent_nothing_is_changed(probe: Any) -> None:
    assert "ElasticAgentCallback" not in probe["without"]["callbacks"]
    assert probe["without"]["adapted"] == []


def test_both_distributions_are_adapted(probe: Any) -> None:
    assert probe["within"]["callbacks"].count("ElasticAgentCallback") == 2


def test_a_feature_that_is_disabled_or_does_not_fit_changes_nothing(probe: Any) -> None:
    """The probe disables ``sampler``, and removes the last method that ``notices`` needs. Two replace none."""
    others = {*Feature} - {Feature.SAMPLER, Feature.NOTICES, Feature.STEPS, Feature.MEMORY}
    assert {*probe["within"]["adapted"]} == {str(feature) for feature in others}


def test_a_wrong_name_of_a_feature_and_what_does_not_fit_are_one_line_each(probe: Any) -> None:
    wrong, *unfit = probe["said"]
    expected = "ELASTIC_AGENT_LIGHTNING_DISABLE='sampler, sampels': no such feature: sampels; expected"
    assert expected in wrong
    assert len(unfit) == 2, "in both distributions"
    for line in unfit:
        assert "2.9.1 differs from 2.6.6, so that these features are left out: notices: " in line
        assert line.endswith("_TrainingEpochLoop._num_ready_batches_reached no longer exists")


def test_slurm_is_left_to_the_agent(probe: Any) -> None:
    """Neither the environment that the script made is used, nor the checkpoint that a requeueing Lightning left."""
    assert probe["slurm"] == {"environment": "TorchElasticEnvironment", "ckpt_path": None, "rank": 0}
