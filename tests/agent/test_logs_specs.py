"""``--logs-specs``: packages that decide where output goes, written for torchrun."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from tests.agent.support import run

PLUGIN = """
import os
from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std

class OneFilePerRank(LogsSpecs):
    @property
    def root_log_dir(self):
        return self._root_log_dir

    def reify(self, envs):
        assert all(isinstance(streams, Std) for streams in (*self._redirects.values(), *self._tee.values()))
        wanted = {slot: self._redirects[slot] == Std.OUT for slot in envs}
        files = {slot: os.path.join(self.root_log_dir, f"{envs[slot]['RANK']}.txt") for slot in envs}
        return LogsDest(
            stdouts={slot: files[slot] if wanted[slot] else "" for slot in envs},
            stderrs=dict.fromkeys(envs, ""),
            error_files=dict.fromkeys(envs, os.devnull),
        )
"""


@pytest.fixture
def packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return a folder with the installed package."""
    packages = tmp_path / "packages"
    (packages / "mine-1.dist-info").mkdir(parents=True)
    (packages / "mine-1.dist-info" / "METADATA").write_text("Name: mine\nVersion: 1\n")
    (packages / "mine-1.dist-info" / "entry_points.txt").write_text(
        "[torchrun.logs_specs]\nper_rank = mine:OneFilePerRank\n"
    )
    (packages / "mine.py").write_text(PLUGIN)
    monkeypatch.setenv("PYTHONPATH", str(packages), prepend=os.pathsep)
    return packages


@pytest.mark.usefixtures("packages")
def test_a_package_for_torchrun_decides_where_output_goes(tmp_path: Path) -> None:
    logs = tmp_path / "logs"
    logs.mkdir()
    options = ("--nproc-per-node", "2", "--logs-specs", "per_rank", "--redirects", "0:1,1:0")
    source = "import os\nprint('I am', os.environ['RANK'])"
    done = run(tmp_path, source, *options, "--log-dir", str(logs))
    assert done.returncode == 0, done.stderr
    assert (done.stdout, (logs / "0.txt").read_text()) == ("I am 1\n", "I am 0\n")
    assert os.listdir(logs) == ["0.txt"]


def test_workers_are_restarted_although_their_package_has_no_files_to_read(
    tmp_path: Path, packages: Path
) -> None:
    (packages / "mine.py").write_text(PLUGIN.replace("dict.fromkeys(envs, os.devnull)", "{}"))
    source = "import os, sys\nsys.exit(3 if os.environ['TORCHELASTIC_RESTART_COUNT'] == '0' else 0)"
    options = ("--logs-specs", "per_rank", "--log-dir", str(tmp_path), "--max-restarts", "1")
    done = run(tmp_path, source, *options)
    assert done.returncode == 0, done.stderr
    assert "cannot read the files of worker 0" in done.stderr
    assert "exited with code 3" in done.stderr
