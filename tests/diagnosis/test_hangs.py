"""The worker that the others wait for, by what flight recorders and stacks show."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import pytest

from elastic_agent.diagnosis.hangs import Hang, HangKind, find_hang
from elastic_agent.diagnosis.records import Collective, GroupProgress, NodeReport, WorkerReport, WorkerState

LOADER_STACK = "/job/train.py:40 in main\n/venv/torch/utils/data/dataloader.py:1289 in _get_data"


def reduces(last: int) -> tuple[Collective, ...]:
    return tuple(Collective(serial, "all_reduce", 25_000_000) for serial in range(max(1, last - 3), last + 1))


def group(
    enqueued: int,
    completed: int,
    recent: tuple[Collective, ...] = (),
    name: str = "0",
    ranks: tuple[int, ...] = (),
) -> GroupProgress:
    last = next((call for call in recent if call.serial == enqueued), None)
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
    by_node: dict[int, list[WorkerReport]] = {}
    for worker in workers:
        by_node.setdefault(worker.rank // 2, []).append(worker)
    reports = [NodeReport(f"n{node + 1}", "i", 1, 0.0, workers=(*own,)) for node, own in by_node.items()]
    return find_hang(reports, world_size or sum(map(len, by_node.values())))


def others(*late: int, ranks: int = 6) -> list[WorkerReport]:
    return [waits(rank) for rank in range(ranks) if rank not in late]


PAIR, BOTH = (1, 2), (0, 1)
WRONG = (*reduces(4710), Collective(4711, "broadcast", 8, "train.py:20"))
AHEAD = (*reduces(4710), Collective(4711, "broadcast", 8), Collective(4712, "all_reduce", 25_000_000))
"""Of a rank whose broadcast from itself completed at once: in the sequence it is ahead, not behind."""
BARRIER = (*reduces(4710), Collective(4711, "barrier", 0))
JOINING = [worker(rank, waits_in="init_process_group", line="train.py:4") for rank in (0, 1, 3)]

CASES: dict[str, tuple[list[WorkerReport], HangKind, list[int], str]] = {
    "elsewhere, with node, collective and line": (
        [*others(3), worker(3, group(4710, 4710, reduces(4710)), line="train.py:70")],
        *(HangKind.BEHIND, [3]),
        (
            "worker n2/1 (rank 3) is one all_reduce behind: 25 MB, sequence number 4711, called by ranks 0-2, 4-5 at "
            "train.py:88; it is at train.py:70"
        ),
    ),
    "in its data loader, by its stack": (
        [*others(3), worker(3, group(4710, 4710, reduces(4710)), line="train.py:40", stack=LOADER_STACK)],
        *(HangKind.DATA_LOADER, [3]),
        "; it waits for its data loader at train.py:40",
    ),
    "in its data loader, and its last collective is not yet noted as complete": (
        [*others(3), worker(3, group(4710, 4709, reduces(4710)), line="train.py:40", stack=LOADER_STACK)],
        *(HangKind.DATA_LOADER, [3]),
        "; it waits for its data loader at train.py:40",
    ),
    "exited with 0, and what it had called is not known": (
        [*others(3), worker(3, state=WorkerState.SUCCEEDED, returncode=0)],
        *(HangKind.EXITED, [3]),
        "worker n2/1 (rank 3) exited with code 0; ranks 0-2, 4-5 wait for it at train.py:88",
    ),
    "the minority of a mismatch, with both lines": (
        [*others(3), worker(3, group(4711, 4710, WRONG), line="train.py:20")],
        *(HangKind.MISMATCH, [3]),
        "called broadcast of 8 B at train.py:20 where ranks 0-2, 4-5 called all_reduce of 25 MB at train.py:88, both",
    ),
    "the first difference counts": (
        [*others(3), worker(3, group(4712, 4711, AHEAD), line="train.py:88")],
        *(HangKind.MISMATCH, [3]),
        "sequence number 4711",
    ),
    "of two ranks that differ the higher one": (
        [waits(0), worker(1, group(4711, 4710, BARRIER))],
        *(HangKind.MISMATCH, [1]),
        "called barrier",
    ),
    "another size of a collective that needs the same": (
        [
            *others(1, ranks=3),
            worker(1, group(4711, 4710, (*reduces(4710), Collective(4711, "all_reduce", 100)))),
        ],
        *(HangKind.MISMATCH, [1]),
        "called all_reduce of 100 B",
    ),
    "sizes may differ in an all_to_all": (
        [worker(rank, group(8, 7, (Collective(8, "all_to_all", 100 * rank),))) for rank in range(3)],
        *(HangKind.TRANSPORT, []),
        "all ranks of group 0 have called all_to_all",
    ),
    "several collectives behind": (
        [*others(2, ranks=4), worker(2, group(4700, 4700, reduces(4700)))],
        *(HangKind.BEHIND, [2]),
        "worker n2/0 (rank 2) is 11 collectives behind: sequence number 4701,",
    ),
    "has called nothing in the group": (
        [waits(0, 1), waits(1, 1), worker(2)],
        *(HangKind.BEHIND, [2]),
        "worker n2/0 (rank 2) is one all_reduce behind: 25 MB, sequence number 1",
    ),
    "at the end of a chain of groups": (  # 0 waits for 1 in the world; 1 in the pair for 2, which is elsewhere
        [
            worker(0, group(5, 4, reduces(5)), line="train.py:9"),
            worker(1, group(4, 4, reduces(4)), group(2, 1, reduces(2), "pair", PAIR), line="train.py:7"),
            worker(2, group(4, 4, reduces(4)), group(1, 1, reduces(1), "pair", PAIR), line="load.py:3"),
        ],
        *(HangKind.BEHIND, [2]),
        "; it is at load.py:3",
    ),
    "groups used in different order": (
        [
            worker(0, group(5, 4, name="a", ranks=BOTH), group(4, 4, name="b", ranks=BOTH)),
            worker(1, group(4, 4, name="a", ranks=BOTH), group(5, 4, name="b", ranks=BOTH)),
        ],
        *(HangKind.CROSSED, [0, 1]),
        "rank 0 for rank 1 in group a, rank 1 for rank 0 in group b",
    ),
    "none outside of a subgroup": (
        [
            worker(0, group(5, 4, reduces(5), "pair", BOTH)),
            worker(1, group(4, 4, reduces(4), "pair", BOTH)),
            *(worker(rank, line="train.py:3") for rank in (2, 3)),
        ],
        *(HangKind.BEHIND, [1]),
        "is one all_reduce behind",
    ),
    "none if all have called the same": (
        others(),
        *(HangKind.TRANSPORT, []),
        "all_reduce of 25 MB, sequence number 4711",
    ),
    "does not join the group, in which no collective was called": (
        [*JOINING, worker(2, line="")],
        *(HangKind.BEHIND, [2]),
        "while ranks 0-1, 3 wait in init_process_group at train.py:4",
    ),
    "waits for a disk": (
        [*others(3), worker(3, group(4710, 4710), is_silent=True, process_state="D")],
        *(HangKind.BEHIND, [3]),
        "waits for a disk or a file server (state D)",
    ),
    "holds Python's lock": (
        [*others(3), worker(3, group(4710, 4710), is_silent=True, process_state="R")],
        *(HangKind.BEHIND, [3]),
        "holds Python's lock",
    ),
    "not one that handles an exception and has called the collective": (
        [
            waits(0),
            msgspec.structs.replace(waits(1), handles="OutOfMemoryError: CUDA out of memory"),
            worker(2, group(4710, 4710), line="train.py:3"),
        ],
        *(HangKind.BEHIND, [2]),
        "it is at train.py:3",
    ),
}


@pytest.mark.parametrize(("workers", "kind", "ranks", "text"), CASES.values(), ids=CASES)
def test_the_worker_that_the_others_wait_for_is_named(
    workers: list[WorkerReport], kind: HangKind, ranks: list[int], text: str
) -> None:
    found = hang_of(workers)
    assert (found.kind, [culprit.rank for culprit in found.culprits]) == (kind, ranks)
    assert text in found.summary
    named = [(culprit.node_id, culprit.slot) for culprit in found.culprits]
    assert named == [(f"n{rank // 2 + 1}", rank % 2) for rank in ranks]


@pytest.mark.parametrize("state", ["T", "t"])
def test_a_stopped_process_is_the_cause_whatever_it_has_called(state: str) -> None:
    late = worker(3, group(4710, 4710), process_state=state, is_silent=True)
    found = hang_of([*others(3), late])
    assert found.kind is HangKind.STOPPED
    assert "worker n2/1 (rank 3) is stopped by a signal" in found.summary
    assert "kill -CONT 1003 on n2" in found.summary_now
    assert "kill" not in found.summary, "of a failure after which the process is dead"


def test_a_node_that_has_not_reported_is_named_by_its_ranks() -> None:
    found = hang_of(others(ranks=4), world_size=6)
    assert [culprit.rank for culprit in found.culprits] == [4, 5]
    assert "each has not reported" in found.summary


def test_long_steps_outside_of_collectives_are_no_hang() -> None:
    assert find(worker(rank, group(10, 10, reduces(10)), line="evaluate.py:5") for rank in range(4)) is None
    assert find([]) is None


def test_the_details_show_every_rank_once_and_equal_stacks_together() -> None:
    stack = "/job/train.py:88 in main\n/venv/torch/distributed/distributed_c10d.py:3252 in all_reduce"
    waiting = [msgspec.structs.replace(other, stack=stack) for other in others(3)]
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


def test_workers_that_have_ceased_to_answer_are_not_taken_for_waiting() -> None:
    """As when all of them are exiting on a busy machine: what is known of each is of another time."""
    known = [(19, 18), (19, 18), (16, 15), (16, 15), (21, 21), (21, 21)]
    silent = [worker(rank, group(*counts), is_silent=True) for rank, counts in enumerate(known)]
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
        assert [culprit.rank for culprit in hang.culprits] == [rank]
        assert (
            "waits in barrier at train.py:10 while it handles ValueError: loss is NaN (train.py:5)"
            in hang.summary
        )


@pytest.mark.parametrize(("nodes", "remedy"), [(1, "all on this machine"), (2, "firewall")])
def test_workers_of_one_machine_that_do_not_meet_are_not_advised_about_a_firewall(
    nodes: int, remedy: str
) -> None:
    ranks = range(2 * nodes)
    hang = hang_of([worker(rank, waits_in="init_process_group", line="train.py:5") for rank in ranks])
    assert remedy in hang.summary
    assert ("firewall" in hang.summary) == (nodes > 1)
