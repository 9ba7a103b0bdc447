"""Shared memory of killed workers is gone before the next ones start, and that of others is not."""

from __future__ import annotations

import json
import os
import secrets
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.testing.processes import wait_for

pytestmark = [pytest.mark.system, pytest.mark.prove]

SCRIPT = Path(__file__).parent / "leaving.py"
SHM = Path("/dev/shm")


@pytest.fixture
def foreign_before() -> Iterator[Path]:
    """Made before the workers were started; no process holds it."""
    path = SHM / f"psm_{secrets.token_hex(4)}"
    path.touch()
    yield path
    path.unlink()


@pytest.fixture
def foreign_since() -> Iterator[Path]:
    """Made while the workers run, by a process of another run that lives on (this one)."""
    path = SHM / f"torch_{os.getpid()}_{secrets.randbelow(10**9)}_0"
    yield path
    path.unlink(missing_ok=True)


def test_the_next_workers_find_no_leftovers(
    tmp_path: Path, foreign_before: Path, foreign_since: Path
) -> None:
    command = [sys.executable, "-m", "elastic_agent", "--nproc-per-node", "2", "--max-restarts", "1"]
    command += ["--shutdown-timeout", "0.5", "--log-format", "json"]
    command += ["--state-dir", str(tmp_path / "state"), str(SCRIPT), str(tmp_path)]
    with (tmp_path / "log").open("wb") as log:
        agent = subprocess.Popen(command, stderr=log, stdout=log)
        try:
            shared = tmp_path / "shared.json"
            wait_for(lambda: shared.exists() or agent.poll() is not None, 90)
            assert shared.exists(), (tmp_path / "log").read_text()
            names = json.loads(shared.read_text())
            assert all((SHM / name).exists() for name in names)
            foreign_since.touch()
            (tmp_path / "go-on").touch()
            assert agent.wait(90) == 0, (tmp_path / "log").read_text()
        finally:
            agent.kill()
            agent.wait()
    assert json.loads((tmp_path / "left.json").read_text()) == []
    lines = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines() if line.startswith("{")]
    removed = [line["files"] for line in lines if "removed shared memory" in line["message"]]
    assert [sorted(files) for files in removed] == [sorted(names)]
    assert foreign_before.exists()
    assert foreign_since.exists()
