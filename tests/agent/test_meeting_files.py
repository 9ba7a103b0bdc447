"""Workers that meet over a file train again after a restart: nothing of killed workers is left in it."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from elastic_agent.workers.cleanup import Cleanup
from tests.agent.support import run
from tests.waiting import GUARD_S

SCRIPT = """
import os, signal, sys
from datetime import timedelta
import torch
import torch.distributed as dist

kind, path = sys.argv[1:]
rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
how = {"init_method": f"file://{path}"}
if kind == "store":
    os.chdir(os.path.dirname(path))
    how = {"store": dist.PrefixStore("mine", dist.FileStore(os.path.basename(path), world_size))}
dist.init_process_group("gloo", rank=rank, world_size=world_size, timeout=timedelta(seconds=40), **how)
total = torch.ones(1)
dist.all_reduce(total)
assert os.path.exists(path)
if rank == 1 and os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    os.kill(os.getpid(), signal.SIGKILL)
dist.all_reduce(total)
print(f"trained in restart {os.environ['TORCHELASTIC_RESTART_COUNT']}")
dist.barrier()
dist.destroy_process_group()  # else torch may abort the interpreter that ends
"""


@pytest.mark.system
@pytest.mark.parametrize("kind", [pytest.param("init_method", marks=pytest.mark.prove), "store"])
def test_workers_that_meet_over_a_file_train_after_one_was_killed(tmp_path: Path, kind: str) -> None:
    options = ("--nproc-per-node", "2", "--max-restarts", "1", "--worker-start", "warm")
    done = run(tmp_path, SCRIPT, *options, arguments=(kind, str(tmp_path / "meeting point")))
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("trained in restart 1") == 2, done.stderr


def test_only_files_are_removed_and_what_cannot_be_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("left")
    (tmp_path / "folder").mkdir()
    cleanup = Cleanup(1)
    cleanup.started()
    cleanup.remove(str(tmp_path / name) for name in ("file", "folder", "missing"))
    assert not cleanup.nothing_to_do
    cleared = threading.Event()
    cleanup.clear(lambda _: cleared.set())
    assert cleared.wait(GUARD_S)
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]
