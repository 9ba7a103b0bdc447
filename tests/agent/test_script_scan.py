"""Which scripts get a Python of their own: those that set what torch reads when it is imported."""

from __future__ import annotations

import textwrap
from pathlib import Path

import pytest

from elastic_agent.agent.worker_group.script_scan import curated_imports, imports, needs_own_python
from elastic_agent.workers.spawner.curated import in_full

ENVIRON = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TORCH_LOGS": "+dynamo", "HOME": "/"}


def why(folder: Path, source: str) -> str | None:
    (folder / "train.py").write_text(textwrap.dedent(source))
    return needs_own_python(str(folder / "train.py"), is_module=False, folder=str(folder), environ=ENVIRON)


@pytest.mark.parametrize(
    ("source", "name", "line"),
    [
        ("os.environ['OMP_NUM_THREADS'] = '4'", "OMP_NUM_THREADS", 2),
        ("from os import environ\nenviron['TORCH_LOGS'] = 'all'", "TORCH_LOGS", 3),
        ("os.environ.setdefault('KMP_AFFINITY', 'none')", "KMP_AFFINITY", 2),
        ("os.environ.update({\n'KMP_AFFINITY': x})", "KMP_AFFINITY", 3),
        ("os.environ.update(GOMP_SPINCOUNT='0')", "GOMP_SPINCOUNT", 2),
        ("os.environ |= dict(PYTORCH_JIT='0')", "PYTORCH_JIT", 2),
        ("os.putenv('PYTORCH_JIT', '0')", "PYTORCH_JIT", 2),
        ("os.environ['PYTORCH_JIT']: str = '0'", "PYTORCH_JIT", 2),
        ("if x:\n  os.environ['TORCH_TRACE'] = x()", "TORCH_TRACE", 3),
        ("def f():\n  import torch\n  os.environ['TORCH_TRACE'] = 'x'\nf()", "TORCH_TRACE", 4),
        ("os.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'backend:x'", "PYTORCH_CUDA_ALLOC_CONF", 2),
        ("os.environ['TORCH_LOGS'] = '+dynamo' if debug else ''", "TORCH_LOGS", 2),
        ("os.environ['OMP_NUM_THREADS'] = f'{cores}1'", "OMP_NUM_THREADS", 2),
        ("os.environ.update(OMP_NUM_THREADS='8', MKL_NUM_THREADS='1')", "OMP_NUM_THREADS", 2),
    ],
)
def test_variables_set_before_the_import_of_torch_are_detected(
    tmp_path: Path, source: str, name: str, line: int
) -> None:
    """Unless a variable has this value already, for certain."""
    reason = why(tmp_path, f"import os\n{source}\nimport torch")
    assert reason is not None
    assert reason.startswith(f"train.py sets {name} in line {line}, which torch reads when it is imported")


@pytest.mark.parametrize(
    "statement",
    [
        "os.environ.pop('OMP_NUM_THREADS', None)",
        "del os.environ['OMP_NUM_THREADS']",
        "os.unsetenv('OMP_NUM_THREADS')",
        "threads = os.environ.pop('OMP_NUM_THREADS')",
    ],
)
def test_variables_removed_before_the_import_of_torch_are_detected(tmp_path: Path, statement: str) -> None:
    assert why(tmp_path, f"import os\n{statement}\nimport torch") == (
        "train.py removes OMP_NUM_THREADS in line 2, which torch reads when it is imported; for warm workers, set it "
        "as needed in the agent's environment"
    )


@pytest.mark.parametrize(
    "source",
    [
        "import torch",
        "import os\nos.environ.pop('KMP_AFFINITY', None)\nimport torch",
        "import os\ndel os.environ['HOME'], mine['OMP_NUM_THREADS']\nmine.pop('OMP_NUM_THREADS')",
        "import os\nos.environ['OMP_NUM_THREADS']: str\nimport torch",
        "import os, torch\nos.environ.pop('OMP_NUM_THREADS')",
        "import os\nos.environ['OMP_NUM_THREADS'] = '1'\nimport torch",
        "import os\nos.environ.setdefault('OMP_NUM_THREADS', '4')\nimport torch",
        "import os, torch.nn\nos.environ['OMP_NUM_THREADS'] = '4'",
        "import os\nos.environ['CUDA_VISIBLE_DEVICES'] = '0'\nos.environ['NCCL_DEBUG'] = 'INFO'",
        "import os\nos.environ['PYTORCH_CUDA_ALLOC_CONF'] = 'expandable_segments:True'",
        "import os\nprint(os.environ['OMP_NUM_THREADS'])",
        "import os\nmine['OMP_NUM_THREADS'] = os.environ['X']",
        "import os\nos.environ['OMP_NUM_THREADS'] = '4'\nif x\n",
        "environ = '\x00'",
    ],
)
def test_other_scripts_start_warm(tmp_path: Path, source: str) -> None:
    assert why(tmp_path, source) is None


def test_a_script_that_sets_its_process_title_starts_cold(tmp_path: Path) -> None:
    assert why(tmp_path, "import torch\nimport setproctitle") == (
        "train.py imports setproctitle, which has no effect in a warm worker"
    )


def test_a_missing_script_is_not_reported_by_the_scan(tmp_path: Path) -> None:
    assert needs_own_python("missing.py", is_module=False, folder=str(tmp_path), environ={}) is None


SETS = "import os\nos.environ['PYTORCH_JIT'] = '0'\n"


@pytest.mark.parametrize(
    ("script", "is_module", "files"),
    [
        ("app", False, {"app/__main__.py": SETS}),
        ("pack.train", True, {"pack/__init__.py": "", "pack/train.py": SETS}),
        ("pack.train", True, {"pack/__init__.py": SETS, "pack/train.py": "import torch"}),
        ("pack", True, {"pack/__init__.py": "raise 1/0", "pack/__main__.py": SETS}),
        ("train", True, {"train.py": SETS}),
    ],
)
def test_folders_and_modules_are_scanned_without_running_them(
    tmp_path: Path, script: str, is_module: bool, files: dict[str, str]
) -> None:
    for name, content in files.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text(content)
    name = script if is_module else str(tmp_path / script)
    reason = needs_own_python(name, is_module=is_module, folder=str(tmp_path), environ={})
    assert reason is not None
    assert "sets PYTORCH_JIT in line 2" in reason


@pytest.mark.parametrize(
    ("source", "trains"),
    [
        ("import torch\noptimizer = torch.optim.SGD(model.parameters(), lr=1)", True),
        ("import torch\ndef main():\n  from torch.optim import SGD", True),
        ("from torch import optim", True),
        ("import torch.optim.adam as adam", True),
        ("from torch.nn.parallel import DistributedDataParallel as DDP", True),
        ("import beside", True),
        ("import lightning", True),
        ("import some_installed_package", True),
        ("import os, numpy, torch.distributed as dist\ndist.init_process_group('gloo')", False),
        ("import quiet\nfrom elastic_agent import client", False),
    ],
)
def test_what_optimizers_import_is_loaded_before_the_workers_if_the_script_may_make_some(
    tmp_path: Path, source: str, trains: bool
) -> None:
    (tmp_path / "beside.py").write_text("import torch\nmake = torch.optim.AdamW\n")
    (tmp_path / "quiet.py").write_text("import torch\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    found = curated_imports(str(script), is_module=False, folder=str(tmp_path))
    assert ("torch._dynamo" in [name for name, _ in in_full(found)]) == trains


@pytest.mark.parametrize(
    ("source", "does"),
    [
        ("from elastic_agent import client, survive", True),
        ("import elastic_agent.survive as survive", True),
        ("from elastic_agent.survive import State", True),
        ("import beside", True),
        ("def main():\n    from elastic_agent import survive", False),
        ("from elastic_agent import client", False),
        ("import torch", False),
    ],
)
def test_a_script_that_may_keep_its_workers_is_recognised(tmp_path: Path, source: str, does: bool) -> None:
    (tmp_path / "beside.py").write_text("from elastic_agent import survive\n")
    script = tmp_path / "train.py"
    script.write_text(source)
    found = imports(str(script), is_module=False, folder=str(tmp_path), module="elastic_agent.survive")
    assert found == does
