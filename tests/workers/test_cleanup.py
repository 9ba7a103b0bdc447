"""Checks with real files and processes that what killed workers leave in /dev/shm is removed, and nothing else."""

from __future__ import annotations

import contextlib
import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from queue import SimpleQueue

import pytest

from elastic_agent.workers import cleanup as cleanup_module
from elastic_agent.workers.cleanup import _NAMES, Cleanup, Held, SharedMemorySweep, SweepReport
from tests.other_users import OTHER_UID, needs_other_users
from tests.processes import name_of
from tests.waiting import GUARD_S
from tests.workers.support import Holder

MakeHolder = Callable[..., Holder]


@pytest.fixture
def hold() -> Iterator[MakeHolder]:
    """Starts holders; what they made is gone in the end."""
    with contextlib.ExitStack() as stack:

        def make(name: str, how: str = "open") -> Holder:
            holder = Holder(name, how)
            stack.callback(holder.path.unlink, missing_ok=True)
            stack.callback(holder.kill)
            return holder

        yield make


def psm() -> str:
    return f"psm_{secrets.token_hex(4)}"


# --- what goes ------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["open", "mapped"])
@pytest.mark.parametrize(
    "name", ["psm_{}", "sem.mp-{}", "cuda.shm.0.{}.1", "sem.loky-PID-{}", "torch_PID_7_0", "NUMBER_barrier"]
)
def test_files_held_by_the_generation_are_removed(hold: MakeHolder, name: str, how: str) -> None:
    sweep = SharedMemorySweep()
    name = name.replace("NUMBER", f"{secrets.randbelow(10**6):06}")
    worker = hold(name.format(secrets.token_hex(4)), how)
    sweep.note([worker.pid])
    worker.kill()
    assert sweep.candidates() == [worker.path.name]
    report = sweep.sweep()
    assert report.removed == (worker.path.name,)
    assert not worker.path.exists()


# --- what stays -----------------------------------------------------------------------------------


def left_alone(sweep: SharedMemorySweep, path: Path) -> bool:
    report = sweep.sweep()
    return path.exists() and report.removed == report.held == ()


def test_files_that_no_process_held_are_kept(hold: MakeHolder) -> None:
    """Another program's: made, closed and to be attached to again."""
    worker = hold(psm())
    sweep = SharedMemorySweep()
    stranger = hold(psm(), "closed")
    sweep.note([worker.pid])
    assert left_alone(sweep, stranger.path)
    stranger.kill()
    assert left_alone(sweep, stranger.path)


@pytest.mark.parametrize(
    "is_earlier", [True, False], ids=["it was there before", "its process never held it"]
)
def test_a_file_with_a_name_of_the_libraries_is_kept_if_it_may_be_anothers(
    hold: MakeHolder, is_earlier: bool
) -> None:
    sweep = SharedMemorySweep()
    holder = hold("torch_PID_123_0", "open" if is_earlier else "closed")
    if is_earlier:
        sweep = SharedMemorySweep()
    sweep.note([holder.pid])
    holder.kill()
    assert left_alone(sweep, holder.path)


def test_files_made_elsewhere_and_attached_by_a_worker_are_kept(hold: MakeHolder) -> None:
    """The stranger has closed it, and lives; the worker is the only process that holds it."""
    sweep = SharedMemorySweep()
    stranger = hold(psm(), "closed")
    assert sweep.has_unseen
    sweep.note([])
    worker = hold(stranger.path.name, "attached")
    sweep.note([worker.pid])
    worker.kill()
    assert left_alone(sweep, stranger.path)


def test_files_first_held_by_another_process_are_kept(hold: MakeHolder) -> None:
    sweep = SharedMemorySweep()
    stranger = hold(psm())
    worker = hold(stranger.path.name, "attached")
    sweep.note([worker.pid])
    stranger.kill()
    worker.kill()
    assert left_alone(sweep, stranger.path)


@pytest.mark.parametrize("how", ["open", "mapped"])
def test_files_held_by_another_process_are_kept_and_it_is_named(hold: MakeHolder, how: str) -> None:
    sweep = SharedMemorySweep()
    worker = hold(psm(), how)
    sweep.note([worker.pid])
    stranger = hold(worker.path.name, "attached")
    worker.kill()
    report = sweep.sweep()
    held = Held(worker.path.name, stranger.pid, name_of(stranger.pid))
    stranger.kill()
    assert report.held == (held,)
    assert report.removed == ()
    assert worker.path.exists()


@needs_other_users
def test_files_of_another_user_are_kept(hold: MakeHolder) -> None:
    sweep = SharedMemorySweep()
    worker = hold(psm())
    os.chown(worker.path, OTHER_UID, -1)
    sweep.note([worker.pid])
    worker.kill()
    assert left_alone(sweep, worker.path)


def test_files_with_other_names_are_kept(hold: MakeHolder) -> None:
    sweep = SharedMemorySweep()
    names = [
        f"mine-{secrets.token_hex(4)}",
        "torch_PID_backup",
        "psm_mine",
        f"nccl-{secrets.token_hex(4)}.log",
    ]
    workers = [hold(name) for name in names]
    sweep.note([worker.pid for worker in workers])
    for worker in workers:
        worker.kill()
    assert all(left_alone(sweep, worker.path) for worker in workers)


def test_a_link_that_took_the_place_of_a_workers_file_is_kept(hold: MakeHolder) -> None:
    sweep = SharedMemorySweep()
    worker = hold(psm())
    sweep.note([worker.pid])
    worker.kill()
    worker.path.unlink()
    worker.path.symlink_to("target")
    assert sweep.sweep().removed == ()
    assert worker.path.is_symlink()


def test_without_a_folder_there_is_nothing_to_do(tmp_path: Path) -> None:
    sweep = SharedMemorySweep(str(tmp_path / "none"))
    sweep.note([os.getpid()])
    assert sweep.sweep().removed == ()


# --- after a generation ---------------------------------------------------------------------------


@pytest.fixture
def cleanup() -> Cleanup:
    """Return one for which this process plays the guard."""
    return Cleanup(os.getpid())


@pytest.fixture
def holder(cleanup: Cleanup, hold: MakeHolder) -> Holder:
    """Start a process that holds a file, after ``cleanup`` has seen what was there before."""
    return hold(psm())


def clear(cleanup: Cleanup, unkillable: Collection[int] = ()) -> SweepReport:
    reports: SimpleQueue[SweepReport] = SimpleQueue()
    cleanup.clear(reports.put, unkillable)
    return reports.get(timeout=GUARD_S)


@pytest.mark.parametrize("is_announced", [True, False], ids=["before a stop", "from time to time"])
def test_files_are_attributed_while_their_holder_lives(
    cleanup: Cleanup, holder: Holder, monkeypatch: pytest.MonkeyPatch, is_announced: bool
) -> None:
    """A worker may be killed alone, so that nothing announces it."""
    monkeypatch.setattr(cleanup_module, "INSPECT_EVERY_S", GUARD_S if is_announced else 0.01)
    noted = threading.Event()
    note = cleanup._sweep.note

    def noting(pids: Collection[int]) -> None:
        note(pids)
        noted.set()

    monkeypatch.setattr(cleanup._sweep, "note", noting)
    cleanup.started()
    if is_announced:
        cleanup.inspect()
    assert noted.wait(GUARD_S)
    holder.kill()
    assert not cleanup.nothing_to_do
    assert clear(cleanup).removed == (holder.path.name,)
    assert not holder.path.exists()
    assert cleanup.nothing_to_do


@pytest.mark.parametrize("is_stuck", [True, False], ids=["an unkillable worker", "a standby"])
def test_unkillable_workers_that_hold_shared_memory_are_named(
    cleanup: Cleanup, holder: Holder, is_stuck: bool
) -> None:
    cleanup.started()
    cleanup.inspect()
    held = clear(cleanup, {holder.pid} if is_stuck else ()).held
    assert [(holder.file, holder.pid) for holder in held] == (
        [(holder.path.name, holder.pid)] if is_stuck else []
    )
    assert holder.path.exists()


def test_a_generation_that_never_started_has_nothing_to_clean_up(cleanup: Cleanup) -> None:
    assert cleanup.nothing_to_do


# --- the libraries' names -------------------------------------------------------------------------


NAMES = """
import multiprocessing
import torch
from joblib.externals.loky.backend.synchronize import SemLock as LokySemLock
from multiprocessing.shared_memory import SharedMemory
from multiprocessing.synchronize import SemLock

memory = SharedMemory(create=True, size=8)
memory.close()
memory.unlink()
assert multiprocessing.get_context("spawn").Lock()
semaphores = ["sem." + kind._make_name().removeprefix("/") for kind in (SemLock, LokySemLock)]
tensor = torch.zeros(4).untyped_storage()._share_filename_cpu_()[1].decode()
print(memory.name, *semaphores, tensor.removeprefix("/"))
"""


def test_the_names_that_python_joblib_and_torch_use_are_known() -> None:
    """In a process of its own: the helper process that Python starts would be ended by other tests."""
    told = subprocess.run([sys.executable, "-c", NAMES], capture_output=True, text=True, check=True)
    found = [_NAMES.fullmatch(name) for name in told.stdout.split()]
    assert len(found) == 4
    assert None not in found, told.stdout
