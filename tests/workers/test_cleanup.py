"""What is cleared away after a generation, and what is said of it."""

from __future__ import annotations

import os
import secrets
import subprocess
import sys
import threading
from collections.abc import Collection, Iterator
from pathlib import Path

import pytest

from elastic_agent.workers.cleanup import generation, shm_cleanup
from elastic_agent.workers.cleanup.generation import Cleanup
from elastic_agent.workers.cleanup.shm_cleanup import SweepReport
from tests.waiting import GUARD_S

HOLD = "import sys; held = open(sys.argv[1], 'x'); print(flush=True); sys.stdin.read()"


@pytest.fixture
def cleanup(monkeypatch: pytest.MonkeyPatch) -> Cleanup:
    """This process plays the guard; looking at other processes may take long."""
    monkeypatch.setattr(generation, "SWEEP_LIMIT_S", GUARD_S)
    monkeypatch.setattr(shm_cleanup, "_OTHERS_LIMIT_S", GUARD_S)
    return Cleanup(os.getpid())


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


def clear(cleanup: Cleanup, unkillable: Collection[int] = ()) -> SweepReport:
    done = threading.Event()
    found = []

    def take(report: SweepReport) -> None:
        found.append(report)
        done.set()

    cleanup.clear(take, unkillable)
    assert done.wait(GUARD_S)
    return found[0]


def test_files_are_attributed_before_the_stop(
    cleanup: Cleanup, shared: Path, child: subprocess.Popen[bytes]
) -> None:
    cleanup.started([child.pid])
    cleanup.inspect()
    looked = threading.Event()
    cleanup._jobs.put(looked.set)
    assert looked.wait(GUARD_S)
    child.kill()
    child.wait()
    assert not cleanup.nothing_to_do
    assert clear(cleanup).removed == (shared.name,)
    assert not shared.exists()
    assert cleanup.nothing_to_do


def test_files_are_attributed_from_time_to_time(
    cleanup: Cleanup, shared: Path, child: subprocess.Popen[bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may be killed alone, so that nothing announces it."""
    monkeypatch.setattr(generation, "INSPECT_EVERY_S", 0.01)
    noted = threading.Event()
    note = cleanup._sweep.note

    def noting(pids: Collection[int]) -> None:
        note(pids)
        noted.set()

    monkeypatch.setattr(cleanup._sweep, "note", noting)
    cleanup.started([child.pid])
    assert noted.wait(GUARD_S)
    child.kill()
    child.wait()
    assert clear(cleanup).removed == (shared.name,)


@pytest.mark.parametrize("is_stuck", [True, False], ids=["an unkillable worker", "a standby"])
def test_unkillable_workers_that_hold_shared_memory_are_named(
    cleanup: Cleanup, shared: Path, child: subprocess.Popen[bytes], is_stuck: bool
) -> None:
    cleanup.started([child.pid])
    cleanup.inspect()
    held = clear(cleanup, {child.pid} if is_stuck else ()).held
    assert [(holder.file, holder.pid) for holder in held] == ([(shared.name, child.pid)] if is_stuck else [])
    assert shared.exists()


def test_a_generation_that_never_started_has_nothing_to_clean_up(cleanup: Cleanup) -> None:
    assert cleanup.nothing_to_do
