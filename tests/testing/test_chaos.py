"""The chaos command tells a correct training script from scripts with a classic mistake each."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = [pytest.mark.system, pytest.mark.prove]

CORRECT = Path(__file__).parent / "scripts" / "correct.py"
SAVE_AND_RENAME = """torch.save(state, path + ".new")
        os.replace(path + ".new", path)"""
MISTAKES = {
    "checkpoint named after a rank": {'"model.pt"': 'f"model-{rank}.pt"', "if rank == 0:": "if True:"},
    "checkpoint is not replaced atomically": {SAVE_AND_RENAME: "torch.save(state, path)"},
    "no resume": {"if os.path.exists(path):": "if False:"},
    "checkpoint in a node-local folder": {
        "import time\n": "import tempfile\nimport time\n",
        "sys.argv[1]": "tempfile.gettempdir()",
    },
}
"""Changes of the correct script, by the name of the mistake."""
IGNORES_NOTICES = {
    "agreement = client.Agreement()\n": "",
    "if (step + 1) % 5 == 0:": "if (step + 1) % 20 == 0:",
    """    if agreement.notice():
        save(step + 1)
        dist.barrier()
        client.leave()
""": "",
}
PRELOAD = ("--preload", "torch._dynamo")
"""Modules that torch's optimizers import when first used, for each node once instead of for each worker."""


def chaos(folder: Path, script: Path, steps: int, *options: str) -> tuple[int, str]:
    """Exit code and output of the command."""
    done = subprocess.run(
        [
            *(sys.executable, "-m", "elastic_agent", "chaos", *PRELOAD, *options),
            *("--", str(script), "{checkpoints}", str(steps)),
        ],
        cwd=folder,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    return done.returncode, done.stdout


def changed_script(folder: Path, changes: dict[str, str]) -> Path:
    """The correct script with these changes."""
    text = CORRECT.read_text()
    for right, wrong in changes.items():
        assert right in text
        text = text.replace(right, wrong)
    script = folder / "train.py"
    script.write_text(text)
    return script


def test_a_correct_script_passes(tmp_path: Path) -> None:
    options = ("--nodes", "2", "--every", "0.5", "--faults", "worker-killed-saving,drain")
    code, said = chaos(tmp_path, CORRECT, 200, *options)
    assert code == 0, said
    assert "mistake" not in said
    assert len(re.findall(r"^chaos: fault \d: .* next training step after [\d.]+ s", said, re.M)) == 2, said
    assert "ok: the script ran to its end" in said
    assert "ok: steps lost after 1 notices: none" in said
    assert "left behind: nothing" in said
    assert list(tmp_path.iterdir()) == []


def test_checkpoints_in_another_folder_are_said_to_be_not_examined(tmp_path: Path) -> None:
    script = changed_script(tmp_path, {"sys.argv[1]": '"."'})
    code, said = chaos(tmp_path, script, 90, "--nodes", "1", "--every", "0.5", "--faults", "worker-killed")
    assert code == 0, said
    assert re.search(r"^not examined: checkpoints: none were found; pass \{checkpoints\} ", said, re.M), said
    assert "torn checkpoints" not in said


@pytest.mark.parametrize(
    ("mistake", "fault", "workers", "remedy"),
    [
        ("checkpoint named after a rank", "worker-killed", 2, "named after the run"),
        ("checkpoint is not replaced atomically", "worker-killed-saving", 1, "os.replace"),
        ("no resume", "worker-killed", 1, "load the latest checkpoint"),
        ("checkpoint in a node-local folder", "worker-killed", 1, "all nodes share"),
    ],
)
def test_a_mistake_is_named_with_its_remedy(
    tmp_path: Path, mistake: str, fault: str, workers: int, remedy: str
) -> None:
    script = changed_script(tmp_path, MISTAKES[mistake])
    options = ("--nodes", "1", "--nproc-per-node", str(workers), "--every", "0.5")
    code, said = chaos(tmp_path, script, 90, *options, "--folder", "out", "--faults", fault)
    assert code == 1, said
    assert re.findall(r"^mistake: ([^:]*):", said, re.M) == [mistake], said
    assert remedy in re.findall(r"^  remedy: (.*)", said, re.M)[0]


def test_steps_lost_because_notices_are_ignored_are_counted_with_the_remedy(tmp_path: Path) -> None:
    script = changed_script(tmp_path, IGNORES_NOTICES)
    code, said = chaos(tmp_path, script, 90, "--nodes", "1", "--every", "0.5", "--faults", "stop")
    assert code == 1, said
    assert re.search(
        r"^FAILED: steps lost after 1 notices: \d+ after stop at step .*client\.leave\(\)", said, re.M
    ), said
    assert "mistake" not in said
