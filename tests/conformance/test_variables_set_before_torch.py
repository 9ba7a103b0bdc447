"""What a script sets before its own import of torch holds as under bare Python, or a line says that it does not."""

from __future__ import annotations

import ast
from pathlib import Path

from .launchers import BARE, GUARDED_WARM, WARM, Job, Launcher, launchers, run_everywhere

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


@launchers(GUARDED_WARM)
def test_what_another_module_sets_is_applied_or_named(launcher: Launcher, tmp_path: Path) -> None:
    """In a warm worker, which runs no line of the script twice."""
    (tmp_path / "settle.py").write_text(f"import os\nos.environ.update({VARIABLES!r})\n")
    (tmp_path / "site-packages").mkdir()
    (tmp_path / "site-packages" / "package.py").write_text(
        "import os\nos.environ['KMP_INIT_AT_FORK'] = 'FALSE'\n"
    )
    once = "import os\nos.mkdir(os.path.join(os.environ['CONFORMANCE_FOLDER'], 'made'))\n"
    sets = "import settle, sys\nsys.path.append('site-packages')\nimport package\n"
    (tmp_path / "train.py").write_text(once + sets + TELL)
    outcomes = run_everywhere(Job("train.py", cwd=tmp_path), tmp_path, [BARE, launcher])
    workers = [outcomes[way.name].worker(0, 0) for way in (launcher, BARE)]
    assert [worker.code for worker in workers] == [0, 0], workers
    seen, expected = (ast.literal_eval(worker.stdout.decode()) for worker in workers)
    lines = workers[0].stderr.decode().splitlines()
    if launcher in (GUARDED_WARM, WARM):
        assert seen["threads"] == expected["threads"] == 1
        others = ", ".join(sorted({"KMP_INIT_AT_FORK", *VARIABLES} - {"OMP_NUM_THREADS"}))
        why = f"{others} were changed after torch was preloaded, which has no effect; use --worker-start cold"
        assert lines == [f"elastic-agent: {why}"]
    else:
        assert seen == expected
        assert not any("elastic-agent:" in line for line in lines)
