"""The JSON schema of settings files, as an editor applies it."""

from __future__ import annotations

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import jsonschema
import pytest

from .support import elastic_agent


@pytest.fixture(scope="module")
def schema() -> dict[str, Any]:
    done = elastic_agent("settings", "--schema")
    assert (done.returncode, done.stderr) == (0, "")
    found: dict[str, Any] = json.loads(done.stdout)
    jsonschema.Draft202012Validator.check_schema(found)
    return found


def problems(schema: dict[str, Any], text: str) -> list[str]:
    errors = jsonschema.Draft202012Validator(schema).iter_errors(tomllib.loads(text))
    return [error.message for error in errors]


def test_a_file_of_init_is_valid_also_with_every_default_in_force(schema: dict[str, Any]) -> None:
    done = elastic_agent(
        "init", "--output", "-", "--nnodes", "1:4", "--standalone", __file__, "--epochs", "3"
    )
    assert done.returncode == 0, done.stderr
    assert "\n#:schema ./elastic-agent.schema.json\n" in done.stdout, "which editors read"
    in_force = re.sub(r"(?m)^# (\w+ = [^#]*[^ #])$", r"\1", done.stdout)
    assert len(tomllib.loads(in_force)) > len(tomllib.loads(done.stdout)) > 0
    assert problems(schema, done.stdout) == problems(schema, in_force) == []


def test_the_examples_are_valid(schema: dict[str, Any]) -> None:
    files = list((Path(__file__).parents[2] / "deploy").rglob("*.toml"))
    assert files
    assert [problems(schema, file.read_text()) for file in files] == [[] for _ in files]


@pytest.mark.parametrize(
    "text",
    ["max_restart = 3", "max_restarts = 'three'\nnnodes = true", "log_format = 'xml'", "[nnodes]\nmin = 1"],
)
def test_a_mistake_is_marked(schema: dict[str, Any], text: str) -> None:
    assert problems(schema, text)


@pytest.mark.parametrize(
    "text",
    [
        "max-restarts = 3",
        "lease_ttl = 2.5\nnnodes = '1:4'",
        "[rdzv_conf]\ntimeout = 3",
        "local_ranks_filter = [0, 1]",
    ],
)
def test_what_the_agent_accepts_is_valid(schema: dict[str, Any], text: str) -> None:
    assert problems(schema, text) == []
