"""A run that does not start: the agent examines its machine."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import asyncio, sys
from elastic_agent.agent.reporting.start_check import StartCheck
from elastic_agent.config.load import load_settings
from elastic_agent.logs import configure_logging
from elastic_agent.protocol import Phase, Plan, Policy
from elastic_agent.protocol.records import RECORD_VERSION
from elastic_agent.rendezvous.events import PlanSeen

async def main(words, starts):
    configure_logging("console", "info", sys.stderr)
    check = StartCheck(load_settings(words, {"HOME": "/root"}).settings, {}, patience_s=0.0)
    check.on_event(PlanSeen(Plan(RECORD_VERSION, 1, Phase.RUNNING if starts else Phase.FORMING, 1, "", Policy())))
    await asyncio.wait([check.task])

asyncio.run(main(sys.argv[2:], sys.argv[1] == "starts"))
"""


def logged(what: str, tmp_path: Path, *options: str) -> str:
    script = tmp_path / "train.py"
    script.write_text("import module_that_is_not_installed\n")
    command = [sys.executable, "-c", PROGRAM, what, "--state-dir", str(tmp_path), *options, str(script)]
    return subprocess.run(command, stderr=subprocess.PIPE, text=True, check=True, timeout=100).stderr


def test_what_keeps_a_run_from_starting_is_logged_once(tmp_path: Path) -> None:
    lines = logged("waits", tmp_path, "--rdzv-endpoint", "localhost:29400", "--nnodes", "2").splitlines()
    assert len(lines) == 3
    assert "the endpoint localhost:29400 means a different machine on every machine" in lines[0] + lines[1]
    assert "imports module_that_is_not_installed" in lines[0] + lines[1]
    assert "run elastic-agent doctor with the same options" in lines[2]


@pytest.mark.parametrize("options", [[], ["--rdzv-endpoint", "localhost:29400", "--nnodes", "2"]])
def test_a_run_that_starts_is_not_examined(tmp_path: Path, options: list[str]) -> None:
    assert logged("starts", tmp_path, *options) == ""
