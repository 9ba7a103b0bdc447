"""A script that is changed while the run goes on: each attempt runs what is there when it starts."""

from __future__ import annotations

from pathlib import Path

import pytest

from .launchers import BARE, GUARDED_WARM, Job, Launcher, Outcome, launchers, run_everywhere

PUTS_THE_NEXT_IN_PLACE = """\
import atexit, os
here, following = os.path.dirname(__file__), int(os.environ["TORCHELASTIC_RESTART_COUNT"]) + 1
def put_in_place():  # at exit, when the traceback has been written
    for name in ("train.py", "helper.py", "newcomer.py"):
        if os.path.exists(f"{here}/{following}-{name}"):
            os.replace(f"{here}/{following}-{name}", f"{here}/{name}")
atexit.register(put_in_place)
"""

ATTEMPTS = (
    {
        "train.py": "import helper\nraise SystemExit(helper.work(0))\n",
        "helper.py": "def work(n): return 'mend me'\n",
    },
    {
        "train.py": "import helper\nprint(helper.__file__)\nhelper.work(1)\n",
        "helper.py": "def work(n):\n    return n / 0  # of the second\n",
    },
    {
        "train.py": "import helper\n\n\nprint('twice mended')\nhelper.work(2)\n",
        "helper.py": "# Longer by a line.\ndef work(n):\n    raise ValueError(n)  # of the third\n",
    },
    {
        "train.py": "import helper, newcomer\nprint(helper.work(3), newcomer.__name__)\n",
        "helper.py": "def work(n):\n    return n\n",
        "newcomer.py": "",
    },
)


def run(launcher: Launcher, folder: Path) -> list[str]:
    """Return what became of each attempt."""
    here = folder / f"script of {launcher.name}"
    here.mkdir()
    for attempt, files in enumerate(ATTEMPTS):
        for name, content in files.items():
            head = PUTS_THE_NEXT_IN_PLACE if name == "train.py" else ""
            path = here / (name if attempt == 0 else f"{attempt}-{name}")
            path.write_text(head + content)
    job = Job("train.py", restarts=len(ATTEMPTS) - 1, cwd=here)
    outcome = run_everywhere(job, folder, [launcher])[launcher.name]
    return [shown(outcome, here, attempt) for attempt in range(len(ATTEMPTS))]


@pytest.mark.prove
@launchers(GUARDED_WARM)
def test_each_attempt_runs_the_current_script_and_modules(launcher: Launcher, tmp_path: Path) -> None:
    everything, expected = run(launcher, tmp_path), run(BARE, tmp_path)
    assert [told.partition("\n")[0] for told in expected] == ["code 1", "code 1", "code 1", "code 0"]
    for attempt, seen in enumerate(everything):
        assert seen == expected[attempt], f"attempt {attempt}:\n{seen}\nunder python -u:\n{expected[attempt]}"


def shown(outcome: Outcome, here: Path, attempt: int) -> str:
    """Return how it ended, without the folder's name."""
    worker = outcome.worker(attempt, 0)
    told = f"code {worker.code}\nstdout: {worker.stdout.decode()}\nstderr: {worker.stderr.decode()}"
    return told.replace(str(here), "(folder)")
