"""The compose file of two nodes, and its image, as far as they can be examined without Docker."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.cli.support import elastic_agent

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "deploy/containers"
NODES = ["node0", "node1"]


@pytest.fixture(scope="module")
def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load((FOLDER / "compose.yaml").read_text())["services"]
    assert list(found) == NODES
    return found


@pytest.fixture(scope="module")
def effective(services: dict[str, Any]) -> list[dict[str, Any]]:
    """What the agent makes of the command of each service."""
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert "\nCOPY examples /examples\n" in dockerfile
    commands = [
        [word.replace("/examples/", f"{ROOT}/examples/") for word in services[node]["command"]]
        for node in NODES
    ]
    done = [elastic_agent("settings", *command) for command in commands]
    assert [run.stderr for run in done] == ["", ""]
    return [tomllib.loads(run.stdout) for run in done]


def test_the_commands_are_accepted_and_belong_to_one_run_of_two_nodes(
    services: dict[str, Any], effective: list[dict[str, Any]]
) -> None:
    assert effective[0] == effective[1]
    settings = effective[0]
    assert settings["nnodes"] == f"1:{len(services)}"
    host = settings["rdzv_endpoint"].partition(":")[0]
    assert host in services
    assert services[host]["hostname"] == host
    assert services["node0"]["healthcheck"]["test"] == ["CMD", "elastic-agent", "status", settings["rdzv_id"]]


def test_the_script_of_the_image_takes_the_arguments(effective: list[dict[str, Any]]) -> None:
    script, (argument,) = Path(effective[0]["script"]), effective[0]["script_args"]
    option, _, folder = argument.partition("=")
    assert f'"{option}"' in script.read_text()
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert re.search(rf"install -d .* {folder} ", dockerfile), "the user of the agent can write there"


def test_workers_can_save_before_a_container_is_killed(
    services: dict[str, Any], effective: list[dict[str, Any]]
) -> None:
    for node in NODES:
        assert services[node]["init"] is True
        assert services[node]["stop_signal"] in effective[0]["signals_to_handle"].split(",")
        grace_s = float(services[node]["stop_grace_period"].removesuffix("s"))
        assert grace_s >= effective[0]["shutdown_timeout"] + 10


def test_signals_reach_the_agent_without_a_shell_and_the_tested_versions_are_installed() -> None:
    dockerfile = (FOLDER / "Dockerfile").read_text()
    assert '\nENTRYPOINT ["elastic-agent"]\n' in dockerfile
    assert "pip install --no-cache-dir -c /build/constraints.txt" in dockerfile


def test_checkpoints_are_shared_and_state_is_not(services: dict[str, Any]) -> None:
    volumes = [set(services[node]["volumes"]) for node in NODES]
    assert volumes[0] & volumes[1] == {"checkpoints:/checkpoints"}
    assert {volume.partition(":")[2] for volume in volumes[0] ^ volumes[1]} == {"/state"}
