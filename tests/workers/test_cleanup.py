"""What is cleared away after a generation, and what is said of it."""

from __future__ import annotations

import contextlib
import os
import resource
import secrets
import subprocess
import sys
import threading
import time
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from elastic_agent.workers.cleanup.generation import Cleanup, Cleared
from elastic_agent.workers.cleanup.gpu_memory import GpuMemory

PATIENCE_S = 20.0
HOLD = "import sys; held = open(sys.argv[1], 'x'); print(flush=True); sys.stdin.read()"


@pytest.fixture
def cleanup(tmp_path: Path) -> Cleanup:
    """This process plays the guard, on a machine without GPUs."""
    return Cleanup(os.getpid(), GpuMemory(driver=str(tmp_path / "none")))


@pytest.fixture
def shared(cleanup: Cleanup) -> Iterator[Path]:
    """A name for a file of the generation; comes after ``cleanup``, which has seen what was there before."""
    path = Path("/dev/shm") / f"psm_{secrets.token_hex(4)}"
    yield path
    path.unlink(missing_ok=True)


@pytest.fixture
def child(shared: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A process below the guard that holds it."""
    with subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    ) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process
        process.kill()


def clear(cleanup: Cleanup, unkillable: Collection[int] = ()) -> Cleared:
    done = threading.Event()
    found = []

    def take(cleared: Cleared) -> None:
        found.append(cleared)
        done.set()

    cleanup.clear(take, unkillable)
    assert done.wait(PATIENCE_S)
    return found[0]


def test_files_are_attributed_before_the_stop(
    cleanup: Cleanup, shared: Path, child: subprocess.Popen[bytes]
) -> None:
    cleanup.started([child.pid])
    cleanup.inspect()
    looked = threading.Event()
    cleanup._put(looked.set)
    assert looked.wait(PATIENCE_S)
    child.kill()
    child.wait()
    assert not cleanup.nothing_to_do
    assert clear(cleanup).shared_memory.removed == (shared.name,)
    assert not shared.exists()
    assert cleanup.nothing_to_do


@pytest.fixture
def untimed(monkeypatch: pytest.MonkeyPatch) -> None:
    """No look is due before the end."""
    monkeypatch.setattr("elastic_agent.workers.cleanup.generation.FIRST_LOOK_S", 1000.0)


def until_seen(cleanup: Cleanup, file: Path) -> None:
    ends_s = time.monotonic() + PATIENCE_S
    while not any(name == file.name for name, _ in cleanup._sweep._classified):
        assert time.monotonic() < ends_s, f"{file} was not seen"
        time.sleep(0.005)  # nothing tells


@pytest.mark.usefixtures("untimed")
def test_files_of_workers_are_detected_on_creation(cleanup: Cleanup, shared: Path) -> None:
    """The worker may be killed at any time."""
    cleanup.started([os.getpid()])
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", HOLD, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL
    )
    until_seen(cleanup, shared)
    worker.kill()
    worker.communicate()
    assert clear(cleanup).shared_memory.removed == (shared.name,)


@pytest.mark.usefixtures("untimed")
def test_files_of_another_program_that_a_worker_attached_are_kept(cleanup: Cleanup, shared: Path) -> None:
    """It was made after the workers had been started, and only the worker has held it since."""
    cleanup.started([os.getpid()])
    with shared.open("x"):  # here, not in a child: every child of this process is one of the generation's
        until_seen(cleanup, shared)
    attach = HOLD.replace("'x'", "'r'")
    worker = subprocess.Popen(
        [sys.executable, "-S", "-c", attach, str(shared)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert worker.stdout is not None
    worker.stdout.readline()
    cleanup.inspect()
    looked = threading.Event()
    cleanup._put(looked.set)
    assert looked.wait(PATIENCE_S)
    worker.kill()
    worker.communicate()
    assert clear(cleanup).shared_memory.removed == ()
    assert shared.exists()


def test_many_open_files_do_not_prevent_the_cleanup(cleanup: Cleanup) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard < 1200:
        pytest.skip(f"this process may open {hard} files only; 1,200 are needed")
    resource.setrlimit(resource.RLIMIT_NOFILE, (1200, hard))
    with contextlib.ExitStack() as stack:
        stack.callback(resource.setrlimit, resource.RLIMIT_NOFILE, (soft, hard))
        for _ in range(1030):
            stack.callback(os.close, os.dup(0))
        cleanup.started([os.getpid()])
        assert clear(cleanup).shared_memory.removed == ()


@pytest.mark.parametrize("is_stuck", [True, False], ids=["an unkillable worker", "a standby"])
def test_unkillable_workers_that_hold_shared_memory_are_named(
    cleanup: Cleanup, shared: Path, child: subprocess.Popen[bytes], is_stuck: bool
) -> None:
    cleanup.started([child.pid])
    cleanup.inspect()
    held = clear(cleanup, {child.pid} if is_stuck else ()).shared_memory.held
    assert [(one.file, one.pid) for one in held] == ([(shared.name, child.pid)] if is_stuck else [])
    assert shared.exists()


def test_a_generation_that_never_started_has_nothing_to_clean_up(cleanup: Cleanup) -> None:
    assert cleanup.nothing_to_do
