"""After an abort by gloo, the last collectives of the workers show which rank passed something else, if they can."""

from __future__ import annotations

from elastic_agent.diagnosis.cause import headline, render
from elastic_agent.diagnosis.records import (
    Collective,
    GroupProgress,
    NodeReport,
    WorkerReport,
    WorkerState,
)
from elastic_agent.diagnosis.root_cause import root_cause

ABORT = "op.preamble.length <= op.nbytes. 668 vs 336. Received data size doesn't match expected size."
RESET = "RuntimeError: Read error [10.0.0.1]:39832: Connection reset by peer"


def call(size: int, serial: int = 4, name: str = "all_reduce", line: str = "train.py:6") -> Collective:
    return Collective(serial, name, size, line)


def aborted(rank: int, line: str = "train.py:6") -> WorkerReport:
    return WorkerReport(
        rank,
        rank,
        WorkerState.FAILED,
        100 + rank,
        -6,
        ended_s=10.0,
        error=ABORT,
        known="collective-shapes",
        line=line,
    )


def reset(rank: int, *calls: Collective) -> WorkerReport:
    """A worker whose connection broke, with its last collectives if it could still report them."""
    progress = (GroupProgress("0", 4, -1, 4, calls[-1], recent=calls),) if calls else ()
    return WorkerReport(
        rank, rank, WorkerState.FAILED, 100 + rank, 1, ended_s=10.1, error=RESET, progress=progress
    )


def said(*workers: WorkerReport) -> str:
    cause = root_cause([NodeReport("n1", "i1", 1, 20.0, host="host-1", workers=workers, is_final=True)])
    assert cause is not None
    return f"{headline(cause)}\n{render(cause)}"


def test_the_rank_that_passed_another_size_is_the_cause_and_not_the_one_that_gloo_aborted() -> None:
    text = said(
        aborted(0), *(reset(rank, call(2000)) for rank in (1, 2, 4)), reset(3, call(4000, line="train.py:9"))
    )
    assert text.startswith(
        "root cause: worker n1/3 (rank 3) on host-1 called all_reduce of 4 kB at train.py:9 where "
        "ranks 1-2, 4 called all_reduce of 2 kB at train.py:6, both with sequence number 4"
    )
    assert "same sequence of collectives" in text
    assert "n1/0 (rank 0) failed too" in text


def test_it_is_only_probable_if_the_aborted_rank_may_have_passed_the_same() -> None:
    text = said(aborted(0), reset(1, call(4000)), reset(2, call(2000)), reset(3, call(2000)))
    assert text.startswith("probable root cause: worker n1/1 (rank 1) on host-1 called all_reduce of 4 kB")


def test_the_aborted_rank_is_the_cause_if_all_others_of_which_it_is_known_called_the_same() -> None:
    text = said(aborted(0, "train.py:9"), reset(1, call(2000)), reset(2), reset(3, call(2000)))
    assert text.startswith(
        "probable root cause: worker n1/0 (rank 0) on host-1 called another collective at train.py:9, or one of "
        "another size, where ranks 1, 3 called all_reduce of 2 kB at train.py:6"
    )


def test_of_two_ranks_none_is_blamed() -> None:
    text = said(aborted(0, "train.py:9"), reset(1, call(4000)))
    assert text.startswith(
        "root cause: rank 1 called all_reduce of 4 kB at train.py:6, and rank 0 called another collective at "
        "train.py:9, or one of another size, with sequence number 4"
    )
    assert "it cannot be told which of them is wrong" in text
    assert "worker n1/0" not in text.splitlines()[0]


def test_of_as_many_ranks_with_one_call_as_with_the_other_none_is_blamed() -> None:
    text = said(aborted(0), reset(1, call(4000)), reset(2, call(2000, line="train.py:9")))
    assert text.startswith(
        "root cause: rank 1 called all_reduce of 4 kB at train.py:6; rank 2 called all_reduce of 2 kB at "
        "train.py:9, both with sequence number 4"
    )


def test_the_first_call_that_differs_counts() -> None:
    """A rank that calls one collective more is ahead from then on."""
    usual = call(2000, 3), call(8, 4, "broadcast")
    other = call(8, 3, "broadcast"), call(2000, 4)
    text = said(aborted(0), reset(1, *usual), reset(2, *usual), reset(3, *other))
    assert "worker n1/3 (rank 3) on host-1 called broadcast of 8 B at train.py:6 where ranks 1-2" in text
    assert "sequence number 3" in text


def test_without_the_others_collectives_the_abort_itself_is_shown_with_its_line() -> None:
    text = said(aborted(0), reset(1), reset(2))
    assert text.startswith("probable root cause: worker n1/0 (rank 0) on host-1: op.preamble.length")
    assert "(at train.py:6)" in text.splitlines()[0]
    assert "another worker may be the one that is wrong" in text


def test_no_rank_is_certainly_wrong_if_torch_says_on_each_that_they_differ() -> None:
    error = (
        "RuntimeError: Detected mismatch between collectives on ranks. Rank {rank} is running collective: …"
    )
    workers = [
        WorkerReport(
            rank,
            rank,
            WorkerState.FAILED,
            returncode=1,
            ended_s=10.0 + rank,
            error=error.format(rank=rank),
            known="collective-mismatch",
        )
        for rank in range(2)
    ]
    text = said(*workers)
    assert text.startswith(
        "probable root cause: worker n1/0 (rank 0) on host-1: RuntimeError: Detected mismatch"
    )
    assert "another worker may be the one that is wrong" in text
    assert "same sequence of collectives" in text
