"""Workers that train independent copies, because their script makes no process group, are reported in one line."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Collection
from pathlib import Path

import pytest

from elastic_agent.agent.reporting import copies
from elastic_agent.agent.reporting.copies import CopiesWatch, trains_alone
from elastic_agent.config.load import load_settings
from elastic_agent.protocol.records import Address, Seat, World
from elastic_agent.workers.guard.client import Spawned
from tests.agent.support import elastic_agent

WARNING = "no worker of this node has made a process group: each of the 2 workers trains a copy of its own"
TRAINS = "import torch\nmodel = torch.nn.Linear(2, 2)\nmodel(torch.ones(2)).sum().backward()\n"

SCRIPTS = {
    "trains alone": ({"train.py": TRAINS}, True),
    "trains alone in a module beside it": (
        {"train.py": "import project.steps", "project/__init__.py": "", "project/steps.py": TRAINS},
        True,
    ),
    "chooses its device by the local rank": (
        {"train.py": f"import os\nlocal = int(os.environ['LOCAL_RANK'])\n{TRAINS}"},
        True,
    ),
    "meets": (
        {"train.py": f"import torch.distributed as dist\n{TRAINS}dist.init_process_group('gloo')\n"},
        False,
    ),
    "has its own share of the data": (
        {"train.py": f"import os\nshare = range(100)[int(os.environ['RANK'])::2]\n{TRAINS}"},
        False,
    ),
    "uses no torch": ({"train.py": "print('no torch, import nothing')\n"}, False),
}


def write(folder: Path, files: dict[str, str]) -> None:
    for name, source in files.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(source)


@pytest.mark.parametrize(("files", "is_told"), SCRIPTS.values(), ids=SCRIPTS)
def test_scripts_that_do_not_divide_their_work_are_told_from_others_by_their_source(
    tmp_path: Path, files: dict[str, str], is_told: bool
) -> None:
    write(tmp_path, files)
    makes_a_group = "init_process_group" in files["train.py"]  # seen when it does, not in the source
    assert trains_alone(str(tmp_path / "train.py"), is_module=False) is (is_told or makes_a_group)


@pytest.mark.prove
@pytest.mark.parametrize(("files", "is_told"), SCRIPTS.values(), ids=SCRIPTS)
def test_workers_that_train_copies_are_reported_at_their_end(
    tmp_path: Path, files: dict[str, str], is_told: bool
) -> None:
    write(tmp_path, files)
    done = elastic_agent(
        *("--nproc-per-node", "2", "--log-format", "console", "--state-dir", str(tmp_path / "state")),
        str(tmp_path / "train.py"),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr.count(WARNING) == is_told, done.stderr
    assert ("made a process group" in done.stderr) is is_told


@pytest.mark.prove
def test_one_worker_trains_no_copies(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(TRAINS)
    done = elastic_agent("--state-dir", str(tmp_path / "state"), str(tmp_path / "train.py"))
    assert "process group" not in done.stderr


@pytest.mark.prove
@pytest.mark.parametrize("introduced", [[], [1]])
def test_they_are_reported_while_they_run_and_only_once(
    tmp_path: Path,
    introduced: Collection[int],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(copies, "SCAN_S", 300.0)
    script = tmp_path / "train.py"
    script.write_text(TRAINS)
    settings = load_settings([str(script)], os.environ).settings
    world = World(1, (Seat("a", "a-1", "127.0.0.1", 2, 0),), Address("127.0.0.1", 1), "a")

    async def scene() -> None:
        watch = CopiesWatch(settings, lambda: world, lambda: introduced, tell_after_s=0.05)
        for generation in (1, 2):
            watch.on_event(Spawned(generation, {0: 1, 1: 2}))
            await asyncio.gather(*asyncio.all_tasks() - {asyncio.current_task()})  # the source is read
            await asyncio.sleep(0.05)  # ends after the timer of the watch: both are timers of one loop
        watch.close()

    asyncio.run(scene())
    told = "".join(capsys.readouterr())
    assert told.count("made a process group in 0.05 s; unless one does, each of the 2") == (not introduced)


def test_a_module_is_found_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "project").mkdir()
    (tmp_path / "project" / "train.py").write_text(TRAINS)
    monkeypatch.chdir(tmp_path)
    assert trains_alone("project.train", is_module=True)
    assert not trains_alone("project.evaluate", is_module=True)
    assert not trains_alone("torch.utils.collect_env", is_module=True)
