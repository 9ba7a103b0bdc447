"""What imports depend on holds for preloaded packages: at the first start, after a restart, at the next start."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from .launchers import BARE, WARM, Job, Launcher
from .tables import names_in

pytestmark = pytest.mark.timeout(900)

SCRIPT = Path(__file__).parent / "scripts" / "surroundings.py"
CASES = names_in(SCRIPT, "CASES")
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


def run(launcher: Launcher, folder: Path) -> Told:
    """Run the script, with the packages in this folder, and let it fail once."""
    for name, content in PACKAGES.items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
    variables = {"CONFORMANCE_FOLDER": str(folder), "PYTHONPATH": str(folder / "site-packages")}
    job = Job(str(SCRIPT), restarts=1, cwd=folder, variables=variables, patience_s=400.0)
    outcome = launcher.run(dataclasses.replace(job), folder)
    told: Told = {}
    for attempt, code in ((0, 1), (1, 0)):
        worker = outcome.worker(attempt, 0)
        assert (worker.code, worker.stderr.decode()) == (code, "")
        for line in worker.stdout.decode().splitlines():
            case, found, modules = json.loads(line)
            told[attempt, case] = [found, None if case == BY_LOT else modules]
    return told


@pytest.fixture(scope="module")
def starts(tmp_path_factory: pytest.TempPathFactory) -> list[Told]:
    """Under plain Python, and at two starts under the agent."""
    folders = [tmp_path_factory.mktemp("plain"), tmp_path_factory.mktemp("agent")]
    plain, first = run(BARE, folders[0]), run(WARM, folders[1])
    for name in ("logs", "journal", "state"):
        (folders[1] / name).rename(folders[1] / f"first-{name}")
    return [plain, first, run(WARM, folders[1])]


@pytest.mark.parametrize("case", [case for case in CASES if case != BY_LOT])
def test_imports_come_to_the_same_as_under_plain_python(starts: list[Told], case: str) -> None:
    plain, *others = starts
    for attempt in (0, 1):
        expected = plain[attempt, case]
        for start, told in enumerate(others):
            assert told[attempt, case] == expected, f"attempt {attempt}, start {start + 1}"


def test_what_is_drawn_from_the_system_at_import_differs(starts: list[Told]) -> None:
    drawn = [told[attempt, BY_LOT][0] for told in starts for attempt in (0, 1)]
    for values in zip(*drawn, strict=True):
        assert len(set(values)) == len(drawn)
