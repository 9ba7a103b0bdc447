"""Which worker the others wait for, from what flight recorders and stacks show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from elastic_agent.diagnosis.hangs import Hang, HangKind, find_hang
from elastic_agent.diagnosis.records import Collective, GroupProgress, NodeReport, WorkerReport, WorkerState

LOADER_STACK = "/job/train.py:40 in main\n/venv/torch/utils/data/dataloader.py:1289 in _get_data"


def reduces(last: int, size: int = 25_000_000) -> tuple[Collective, ...]:
    return tuple(Collective(serial, "all_reduce", size) for serial in range(max(1, last - 3), last + 1))


def group(
    enqueued: int,
    completed: int,
    recent: tuple[Collective, ...] = (),
    name: str = "0",
    ranks: tuple[int, ...] = (),
) -> GroupProgress:
    last = next((one for one in recent if one.serial == enqueued), None)
    return GroupProgress(name, enqueued, -1, completed, last, ranks, recent)


def worker(rank: int, *groups: GroupProgress, line: str = "", **more: Any) -> WorkerReport:
    state = more.pop("state", WorkerState.RUNNING)
    return WorkerReport(rank % 2, rank, state, 1000 + rank, line=line, progress=groups, **more)


def waits(rank: int, last: int = 4711) -> WorkerReport:
    """A worker in an all_reduce that some other rank has not called."""
    recent = reduces(last)
    at = msgspec.structs.replace(recent[-1], line="train.py:88")
    return worker(rank, group(last, last - 1, (*recent[:-1], at)), line="train.py:88")


def hang_of(workers: Iterable[WorkerReport], world_size: int | None = None) -> Hang:
    found = find(workers, world_size)
    assert found is not None
    return found


def find(workers: Iterable[WorkerReport], world_size: int | None = None) -> Hang | None:
    """As reported by nodes of two workers each, from n1 on."""
    listed = list(workers)
    nodes = sorted({one.rank // 2 for one in listed})
    reports = [
        NodeReport(f"n{node + 1}", "i", 1, 0.0, workers=tuple(one for one in listed if one.rank // 2 == node))
        for node in nodes
    ]
    return find_hang(reports, len(listed) if world_size is None else world_size)


def others(*late: int, ranks: int = 6) -> list[WorkerReport]:
    return [waits(rank) for rank in range(ranks) if rank not in late]


def test_a_rank_that_is_elsewhere_is_named_with_node_collective_and_line() -> None:
    found = hang_of([*others(3), worker(3, group(4710, 4710, reduces(4710)), line="train.py:70")])
    assert (found.kind, [one.rank for one in found.culprits]) == (HangKind.BEHIND, [3])
    assert (found.culprits[0].node_id, found.culprits[0].slot) == ("n2", 1)
    assert found.summary == (
        "worker n2/1 (rank 3) is one all_reduce behind: 25 MB, sequence number 4711, called by ranks 0-2, 4-5 at "
        "train.py:88; it is at train.py:70"
    )


def test_a_rank_that_waits_for_its_data_loader_is_told_apart_by_its_stack() -> None:
    late = worker(3, group(4710, 4710, reduces(4710)), line="train.py:40", stack=LOADER_STACK)
    found = hang_of([*others(3), late])
    assert found.kind is HangKind.DATA_LOADER
    assert found.summary.endswith("; it waits for its data loader at train.py:40")


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_the_cause_whatever_it_has_called(state: str) -> None:
    late = worker(3, group(4710, 4710), process_state=state, is_silent=True)
    found = hang_of([*others(3), late])
    assert found.kind is HangKind.STOPPED
    assert "worker n2/1 (rank 3) is stopped by a signal" in found.summary
    assert "kill -CONT 1003 on n2" in found.summary_now
    assert "kill" not in found.summary, "of a failure after which the process is dead"


def test_a_worker_that_has_exited_with_0_is_named_with_the_line_where_the_others_wait() -> None:
    """What it had called is not known."""
    found = hang_of([*others(3), worker(3, state=WorkerState.SUCCEEDED, returncode=0)])
    assert (found.kind, found.culprits[0].rank) == (HangKind.EXITED, 3)
    assert found.summary == (
        "worker n2/1 (rank 3) exited with code 0; ranks 0-2, 4-5 wait for it at train.py:88"
    )


def test_the_minority_of_a_mismatch_is_named_with_both_lines() -> None:
    wrong = (*reduces(4710), Collective(4711, "broadcast", 8, "train.py:20"))
    found = hang_of([*others(3), worker(3, group(4711, 4710, wrong), line="train.py:20")])
    assert (found.kind, [one.rank for one in found.culprits]) == (HangKind.MISMATCH, [3])
    assert (
        "worker n2/1 (rank 3) called broadcast of 8 B at train.py:20 where ranks 0-2, 4-5 called all_reduce of "
        "25 MB at train.py:88, both with sequence number 4711"
    ) in found.summary


def test_the_first_difference_counts_also_when_the_rank_went_on_from_there() -> None:
    """Its broadcast from itself completed at once: in the sequence it is ahead, not behind."""
    wrong = (*reduces(4710), Collective(4711, "broadcast", 8), Collective(4712, "all_reduce", 25_000_000))
    found = hang_of([*others(3), worker(3, group(4712, 4711, wrong), line="train.py:88")])
    assert (found.kind, [one.rank for one in found.culprits]) == (HangKind.MISMATCH, [3])
    assert "sequence number 4711" in found.summary


def test_of_two_ranks_that_differ_the_lower_one_is_taken_to_be_right() -> None:
    barrier = (*reduces(4710), Collective(4711, "barrier", 0))
    found = hang_of([waits(0), worker(1, group(4711, 4710, barrier))])
    assert [one.rank for one in found.culprits] == [1]


def test_different_sizes_are_a_mismatch_for_collectives_that_need_the_same_size_only() -> None:
    small = (*reduces(4710), Collective(4711, "all_reduce", 100))
    assert hang_of([*others(1, ranks=3), worker(1, group(4711, 4710, small))]).kind is HangKind.MISMATCH
    uneven = [
        worker(rank, group(8, 7, (Collective(8, "all_to_all", 100 * rank),)), line="train.py:5")
        for rank in range(3)
    ]
    assert hang_of(uneven).kind is HangKind.TRANSPORT


def test_several_collectives_behind() -> None:
    found = hang_of([*others(2, ranks=4), worker(2, group(4700, 4700, reduces(4700)))])
    assert found.summary.startswith("worker n2/0 (rank 2) is 11 collectives behind: sequence number 4701,")


def test_a_rank_that_has_called_nothing_in_the_group_is_behind_from_the_start() -> None:
    found = hang_of([waits(0, 1), waits(1, 1), worker(2)])
    assert found.summary.startswith("worker n2/0 (rank 2) is one all_reduce behind: 25 MB, sequence number 1")


def test_a_node_that_has_not_reported_is_named_by_its_ranks() -> None:
    found = hang_of(others(ranks=4), world_size=6)
    assert [one.rank for one in found.culprits] == [4, 5]
    assert "each has not reported" in found.summary


def test_the_rank_at_the_end_of_a_chain_of_groups_is_to_blame() -> None:
    """Rank 0 waits for 1 in the world; 1 waits in the pair for 2, which is elsewhere."""
    pair = (1, 2)
    found = hang_of(
        [
            worker(0, group(5, 4, reduces(5)), line="train.py:9"),
            worker(1, group(4, 4, reduces(4)), group(2, 1, reduces(2), "pair", pair), line="train.py:7"),
            worker(2, group(4, 4, reduces(4)), group(1, 1, reduces(1), "pair", pair), line="load.py:3"),
        ]
    )
    assert [one.rank for one in found.culprits] == [2]
    assert found.summary.endswith("; it is at load.py:3")


def test_groups_that_are_used_in_different_order_are_told() -> None:
    both = (0, 1)
    found = hang_of(
        [
            worker(0, group(5, 4, name="a", ranks=both), group(4, 4, name="b", ranks=both)),
            worker(1, group(4, 4, name="a", ranks=both), group(5, 4, name="b", ranks=both)),
        ]
    )
    assert found.kind is HangKind.CROSSED
    assert "rank 0 for rank 1 in group a, rank 1 for rank 0 in group b" in found.summary


def test_ranks_outside_of_a_subgroup_are_not_blamed() -> None:
    pair = (0, 1)
    found = hang_of(
        [
            worker(0, group(5, 4, reduces(5), "pair", pair)),
            worker(1, group(4, 4, reduces(4), "pair", pair)),
            worker(2, line="train.py:3"),
            worker(3, line="train.py:3"),
        ]
    )
    assert [one.rank for one in found.culprits] == [1]


def test_if_all_have_called_the_same_collective_no_worker_is_blamed() -> None:
    found = hang_of(others())
    assert (found.kind, found.culprits) == (HangKind.TRANSPORT, ())
    assert "all_reduce of 25 MB, sequence number 4711" in found.summary


def test_a_rank_that_does_not_join_the_group_is_found_though_no_collective_was_called() -> None:
    joining = [worker(rank, waits_in="init_process_group", line="train.py:4") for rank in (0, 1, 3)]
    found = hang_of([*joining, worker(2, line="")])
    assert [one.rank for one in found.culprits] == [2]
    assert "while ranks 0-1, 3 wait in init_process_group at train.py:4" in found.summary


@pytest.mark.parametrize(
    ("state", "words"), [("D", "waits for a disk or a file server (state D)"), ("R", "holds Python's lock")]
)
def test_a_worker_that_does_not_answer_is_described_by_its_state(state: str, words: str) -> None:
    late = worker(3, group(4710, 4710), is_silent=True, process_state=state)
    assert words in hang_of([*others(3), late]).summary


def test_long_steps_outside_of_collectives_are_no_hang() -> None:
    assert find(worker(rank, group(10, 10, reduces(10)), line="evaluate.py:5") for rank in range(4)) is None
    assert find([]) is None


def test_the_details_show_every_rank_once_and_equal_stacks_together() -> None:
    stack = "/job/train.py:88 in main\n/venv/torch/distributed/distributed_c10d.py:3252 in all_reduce"
    waiting = [msgspec.structs.replace(one, stack=stack) for one in others(3)]
    late = worker(3, group(4710, 4710), line="train.py:70", stack="/job/train.py:70 in load")
    lines = hang_of([*waiting, late]).details.splitlines()
    call = "waits in all_reduce of 25 MB, sequence number 4711"
    assert lines == [
        f"workers n1/0, n1/1, n2/0, n3/0, n3/1 (ranks 0-2, 4-5): {call}, at train.py:88",
        *(f"    {line}" for line in stack.splitlines()),
        "worker n2/1 (rank 3): has completed 4710 collectives, at train.py:70",
        "    /job/train.py:70 in load",
    ]


def test_a_summary_is_never_longer_than_a_failure_may_be() -> None:
    late = [worker(rank, group(4710, 4710), line="x" * 500) for rank in range(1, 40)]
    assert len(hang_of([waits(0), *late]).summary) <= 512


def test_ranks_that_do_not_get_connected_are_no_matter_of_the_order_of_collectives() -> None:
    def connecting(*ranks: int) -> list[WorkerReport]:
        return [worker(rank, line="train.py:9", waits_in="init_process_group") for rank in ranks]

    for workers, names in (
        (connecting(0, 1), "n1/0 (rank 0), n1/1 (rank 1)"),
        ([*others(2, 3, ranks=4), *connecting(2, 3)], "n2/0 (rank 2), n2/1 (rank 3)"),
    ):
        found = hang_of(workers)
        assert found.kind is HangKind.TRANSPORT
        assert found.summary.startswith(
            f"workers {names} are still in init_process_group at train.py:9: the workers"
        )


def test_a_rank_whose_last_collective_is_not_yet_noted_as_complete_does_not_wait_for_itself() -> None:
    late = worker(3, group(4710, 4709, reduces(4710)), line="train.py:40", stack=LOADER_STACK)
    found = hang_of([*others(3), late])
    assert (found.kind, [one.rank for one in found.culprits]) == (HangKind.DATA_LOADER, [3])


def test_workers_that_have_ceased_to_answer_are_not_taken_for_waiting() -> None:
    """As when all of them are exiting on a busy machine: what is known of each is of another time."""
    known = [(19, 18), (19, 18), (16, 15), (16, 15), (21, 21), (21, 21)]
    silent = [worker(rank, group(*one), is_silent=True) for rank, one in enumerate(known)]
    assert find(silent) is None
    answering = [waits(0, 22), *silent[1:]]
    assert hang_of(answering).kind is HangKind.BEHIND, "one of them waits, and says so"


def test_an_exception_is_the_cause_that_a_worker_handles_while_it_waits() -> None:
    """Also where the recorders say that most of the others are wrong."""
    error = {"handles": "ValueError: loss is NaN", "raised_at": "train.py:5", "waits_in": "barrier"}
    barrier = group(4711, 4710, (*reduces(4710), Collective(4711, "barrier")))
    for size, rank in ((3, 1), (2, 0)):
        others = [waits(other) for other in range(size) if other != rank]
        hang = hang_of([*others, worker(rank, barrier, line="train.py:10", **error)])
        assert hang.kind is HangKind.EXCEPTION
        assert [one.rank for one in hang.culprits] == [rank]
        assert (
            "waits in barrier at train.py:10 while it handles ValueError: loss is NaN (train.py:5)"
            in hang.summary
        )


def test_an_exception_that_another_worker_handles_is_not_why_it_waits() -> None:
    """It has called the collective; the cause is elsewhere."""
    recovering = msgspec.structs.replace(waits(1), handles="OutOfMemoryError: CUDA out of memory")
    hang = hang_of([waits(0), recovering, worker(2, group(4710, 4710), line="train.py:3")])
    assert hang.kind is HangKind.BEHIND
    assert [one.rank for one in hang.culprits] == [2]


@pytest.mark.parametrize(("nodes", "remedy"), [(1, "all on this machine"), (2, "firewall")])
def test_workers_of_one_machine_that_do_not_meet_are_not_advised_about_a_firewall(
    nodes: int, remedy: str
) -> None:
    ranks = range(2 * nodes)
    hang = hang_of([worker(rank, waits_in="init_process_group", line="train.py:5") for rank in ranks])
    assert remedy in hang.summary
    assert ("firewall" in hang.summary) == (nodes > 1)
