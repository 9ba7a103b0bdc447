"""A worker on a terminal: its streams are what they are under ``python -u``."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .launchers import BARE, LAUNCHERS, Job, Outcome, run_everywhere

pytestmark = pytest.mark.timeout(120)

Ran = tuple[dict[str, Outcome], dict[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def ran(tmp_path_factory: pytest.TempPathFactory) -> Ran:
    """What became of each, and what each saw, by launcher."""
    folder = tmp_path_factory.mktemp("terminal")
    outcomes = run_everywhere(Job("terminal.py", terminal=True), folder)
    return outcomes, {name: json.loads((folder / name / "terminal.json").read_text()) for name in outcomes}


@pytest.mark.parametrize("launcher", [one.name for one in LAUNCHERS])
@pytest.mark.parametrize("stream", ["stdin", "stdout", "stderr", "controlling terminal"])
def test_streams_of_workers_are_a_terminal_if_the_agents_are(ran: Ran, launcher: str, stream: str) -> None:
    seen, expected = ran[1][launcher][stream], ran[1][BARE.name][stream]
    assert seen == expected, f"{stream}: {seen}\nunder python -u: {expected}"


@pytest.mark.parametrize("launcher", [one.name for one in LAUNCHERS])
def test_output_of_workers_is_shown(ran: Ran, launcher: str) -> None:
    said = ran[0][launcher].said
    assert "a word on stdout" in said
    assert "a word on stderr" in said
