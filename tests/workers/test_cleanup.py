"""Checks what is removed after a generation, and what is reported of it."""

from __future__ import annotations

import os
import secrets
import threading
from collections.abc import Collection, Iterator

import pytest

from elastic_agent.workers import cleanup as cleanup_module
from elastic_agent.workers.cleanup import Cleanup, SweepReport
from tests.waiting import GUARD_S
from tests.workers.support import Holder


@pytest.fixture
def cleanup() -> Cleanup:
    """Return one for which this process plays the guard."""
    return Cleanup(os.getpid())


@pytest.fixture
def holder(cleanup: Cleanup) -> Iterator[Holder]:
    """A process below the guard that holds a file; comes after ``cleanup``, which has seen what was there before."""
    holder = Holder(f"psm_{secrets.token_hex(4)}")
    yield holder
    holder.kill()
    holder.path.unlink(missing_ok=True)


def clear(cleanup: Cleanup, unkillable: Collection[int] = ()) -> SweepReport:
    done = threading.Event()
    found = []

    def take(report: SweepReport) -> None:
        found.append(report)
        done.set()

    cleanup.clear(take, unkillable)
    assert done.wait(GUARD_S)
    return found[0]


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
