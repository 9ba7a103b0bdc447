"""What imports depend on holds for preloaded packages: at the first start, after a restart, at the next start."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from .launchers import BARE, GUARDED_WARM, SCRIPTS, WARM, Job, Launcher

SCRIPT = SCRIPTS / "surroundings.py"
BY_LOT = "names_by_lot"

PACKAGES = {
    "site-packages/plain.py": """
import os
WHO = "installed"
def set_variables(folder):
    os.environ["READ_AT_IMPORT"] = "set"
    os.environ["HF_HOME"] = os.path.join(folder, "home")
""",
    "site-packages/doubles.py": """
import sys, torch
torch.set_default_dtype(torch.float64)
sys.excepthook = lambda *_: None
""",
    "site-packages/seeds.py": """
import random, numpy, torch
random.seed(1), numpy.random.seed(2), torch.manual_seed(3)
""",
    "site-packages/draws.py": "import random, torch\nDRAWN = random.random(), torch.rand(1)\n",
    "site-packages/reads.py": "import os\nVALUE = os.environ.get('READ_AT_IMPORT')\n",
    "site-packages/captures.py": "from torch.nn import Linear as CAPTURED\n",
    "site-packages/tells.py": """
import os, sys, __main__
ARGV, FILE, BYTES = sys.argv, __main__.__file__, os.environb.get(b"SET_AS_BYTES", b"no").decode()
""",
    "site-packages/lots.py": """
import os, secrets, tempfile, uuid
ID, TOKEN = str(uuid.uuid4()), secrets.token_hex()
SCRATCH = tempfile.mkdtemp(suffix=str(os.getpid()))
""",
    "site-packages/hydra/__init__.py": "RELEASE = 1\n",
    "site-packages/hydra_core-1.9.dist-info/METADATA": "Metadata-Version: 2.1\nName: hydra-core\nVersion: 1.9\n",
    "third_party/plain.py": "WHO = 'vendored'\n",
    "third_party/omegaconf/__init__.py": "WHO = 'vendored'\n",
}

Told = dict[tuple[int, str], Any]
"""What was told in each attempt about each case."""


def run(launcher: Launcher, folder: Path, script: Path) -> Told:
    """Run the script, with the packages in this folder, and let it fail once."""
    for name, content in PACKAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    variables = {"CONFORMANCE_FOLDER": str(folder), "PYTHONPATH": str(folder / "site-packages")}
    job = Job(str(script), restarts=1, cwd=folder, variables=variables)
    outcome = launcher.run(job, folder)
    told: Told = {}
    for attempt, code in ((0, 1), (1, 0)):
        worker = outcome.worker(attempt, 0)
        assert (worker.code, worker.stderr.decode()) == (code, "")
        for line in worker.stdout.decode().splitlines():
            case, found, modules = json.loads(line)
            told[attempt, case] = [found, None if case == BY_LOT else modules]
    return told


def check(plain: Told, *others: Told) -> None:
    for start, told in enumerate(others, 1):
        assert told.keys() == plain.keys()
        for (attempt, case), found in told.items():
            if case != BY_LOT:
                assert found == plain[attempt, case], f"{case}: {attempt=}, {start=}"
    drawn = [told[attempt, BY_LOT][0] for told in (plain, *others) for attempt in (0, 1)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == len(drawn), "what is drawn from the system at import differs"


def test_imports_come_to_the_same_as_under_plain_python(tmp_path: Path) -> None:
    plain = run(BARE, tmp_path / "plain", SCRIPT)
    check(plain, run(GUARDED_WARM, tmp_path / "guarded", SCRIPT))


@pytest.mark.prove
def test_imports_of_frameworks_come_to_the_same_as_under_plain_python(tmp_path: Path) -> None:
    """Under plain Python, and at two starts under the agent."""
    script = SCRIPTS / "surroundings_with_frameworks.py"
    plain, first = run(BARE, tmp_path / "plain", script), run(WARM, tmp_path / "agent", script)
    for name in ("logs", "journal", "state"):
        (tmp_path / "agent" / name).rename(tmp_path / "agent" / f"first-{name}")
    check(plain, first, run(WARM, tmp_path / "agent", script))
