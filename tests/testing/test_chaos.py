"""The chaos command tells a correct training script from scripts with a classic mistake each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPTS = Path(__file__).parent / "scripts"
PRELOAD = ("--preload", "torch._dynamo")
"""What torch's optimizers import when they are used first, once for each node instead of once for each worker."""


def chaos(folder: Path, script: str, steps: int, *options: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "elastic_agent", "chaos", *PRELOAD, *options),
            *("--", str(SCRIPTS / f"{script}.py"), "{checkpoints}", str(steps)),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    return done.returncode, done.stdout


@pytest.mark.faults
@pytest.mark.timeout(300)
def test_a_correct_script_passes(tmp_path: Path) -> None:
    code, said = chaos(tmp_path, "correct", 200, "--nodes", "2", "--faults", "worker-killed-saving,drain")
    assert code == 0, said
    assert "mistake" not in said
    assert len(re.findall(r"^chaos: fault \d: .* next training step after [\d.]+ s", said, re.M)) == 2, said
    assert re.search(
        r"^ok: final loss .* of the undisturbed run|^ok: final loss .* undisturbed", said, re.M
    ), said
    assert "left behind: nothing" in said
    assert list(tmp_path.iterdir()) == []


@pytest.mark.faults
@pytest.mark.timeout(300)
@pytest.mark.parametrize(
    ("script", "fault", "workers", "mistake", "remedy"),
    [
        ("named_after_rank", "worker-killed", 2, "checkpoint named after a rank", "named after the run"),
        ("saved_in_place", "worker-killed-saving", 1, "checkpoint is not replaced atomically", "os.replace"),
        ("no_resume", "worker-killed", 1, "no resume", "load the latest checkpoint"),
        ("notice_ignored", "stop", 1, "notice ignored", "client.leave()"),
        ("saved_locally", "worker-killed", 1, "checkpoint in a node-local folder", "all nodes share"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    tmp_path: Path, script: str, fault: str, workers: int, mistake: str, remedy: str
) -> None:
    options = ("--nodes", "1", "--nproc-per-node", str(workers), "--no-baseline", "--every", "0.5")
    code, said = chaos(tmp_path, script, 90, *options, "--folder", "out", "--faults", fault)
    assert code == 1, said
    assert re.findall(r"^mistake: ([^:]*):", said, re.M) == [mistake], said
    assert remedy in re.findall(r"^  remedy: (.*)", said, re.M)[0]
