"""What a script sets before its own import of torch holds as under bare Python, or a line says that it does not."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from pathlib import Path

import pytest

from .launchers import BARE, GUARDED_WARM, WARM, Job, Launcher, Outcome, launchers, run_everywhere

VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "TORCH_DISTRIBUTED_DEBUG": "DETAIL",
    "TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1",
    "PYTORCH_JIT": "0",
    "TORCH_LOGS": "+dynamo",
}

TELL = """
import logging, torch, torch.distributed
print({
    "threads": torch.get_num_threads(),
    "debug": torch.distributed.get_debug_level().name,
    "precision": torch.get_float32_matmul_precision(),
    "scripted": type(torch.jit.script(torch.nn.Linear(1, 1))).__name__,
    "log": logging.getLogger("torch._dynamo").level,
})
"""


def run(folder: Path, launchers: Sequence[Launcher], *, in_another_module: bool) -> dict[str, Outcome]:
    sets = f"import os\nfor name, value in {VARIABLES!r}.items():\n    os.environ[name] = value\n"
    lines = "".join(f"os.environ[{name!r}] = {value!r}\n" for name, value in VARIABLES.items())
    (folder / "settle.py").write_text(sets)
    once = "import os\nos.mkdir(os.path.join(os.environ['CONFORMANCE_FOLDER'], 'made'))\n"
    installed = folder / "site-packages"
    installed.mkdir()
    (installed / "package.py").write_text("import os\nos.environ['KMP_INIT_AT_FORK'] = 'FALSE'\n")
    use_package = "import sys\nsys.path.append('site-packages')\nimport package\n"
    before = "import settle\n" if in_another_module else f"import os\n{lines}"
    (folder / "train.py").write_text(once + before + (use_package if in_another_module else "") + TELL)
    return run_everywhere(Job("train.py", cwd=folder), folder, launchers)


def told(outcome: Outcome) -> dict[str, object]:
    worker = outcome.worker(0, 0)
    assert worker.code == 0, worker.stderr.decode()
    found: dict[str, object] = ast.literal_eval(worker.stdout.decode())
    return found


@pytest.mark.prove
@launchers(WARM)
def test_variables_set_by_the_script_take_effect(launcher: Launcher, tmp_path: Path) -> None:
    outcomes = run(tmp_path, [BARE, launcher], in_another_module=False)
    expected = told(outcomes[BARE.name])
    assert (expected["threads"], expected["debug"], expected["precision"]) == (1, "DETAIL", "high")
    assert told(outcomes[launcher.name]) == expected
    assert b"elastic-agent:" not in outcomes[launcher.name].worker(0, 0).stderr
    if launcher == WARM:
        assert "workers start cold: train.py sets OMP_NUM_THREADS in line 4" in outcomes[WARM.name].said


@launchers(GUARDED_WARM)
def test_what_another_module_sets_is_applied_or_named(launcher: Launcher, tmp_path: Path) -> None:
    """In a warm worker, which runs no line of the script twice."""
    outcomes = run(tmp_path, [BARE, launcher], in_another_module=True)
    seen, expected = told(outcomes[launcher.name]), told(outcomes[BARE.name])
    said = outcomes[launcher.name].worker(0, 0).stderr.decode().splitlines()
    if launcher in (GUARDED_WARM, WARM):
        assert seen["threads"] == expected["threads"] == 1
        others = ", ".join(sorted({"KMP_INIT_AT_FORK", *VARIABLES} - {"OMP_NUM_THREADS"}))
        why = f"{others} were changed after torch was preloaded, which has no effect; use --worker-start cold"
        assert said == [f"elastic-agent: {why}"]
    else:
        assert seen == expected
        assert not any("elastic-agent:" in line for line in said)
