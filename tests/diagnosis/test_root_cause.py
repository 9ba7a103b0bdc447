"""The root cause of a failure is found from the reports of the nodes, whatever they observed first."""

from __future__ import annotations

import random
import re
from collections.abc import Iterable
from dataclasses import replace as replace_end
from typing import Any

import pytest
from msgspec.structs import replace

from elastic_agent.diagnosis.cause import MOST_LINES, CauseKind, RootCause, folded, headline, render
from elastic_agent.diagnosis.records import NodeReport, WorkerReport, WorkerState
from elastic_agent.diagnosis.root_cause import root_cause
from elastic_agent.protocol import Address, Failure, FailureKind, Phase, Plan, Policy, Seat, World
from elastic_agent.workers.failure import describe

from .scenes import HARMLESS, TEXTS, End, report, reports, scene, worker


def each(*ends: tuple[str | End, float, dict[str, Any]] | tuple[str | End, float]) -> list[NodeReport]:
    """Reports of nodes with one worker each: how it ended, how many seconds after the first one, and more."""
    return [
        report(
            rank,
            worker(
                0,
                rank,
                scene(end)[0] if isinstance(end, str) else end,
                1e9 + after_s,
                **(dict(*more) if more else {}),
            ),
        )
        for rank, (end, after_s, *more) in enumerate(ends)
    ]


def found(known: Iterable[NodeReport], plan: Plan | None = None) -> RootCause:
    cause = root_cause(known, plan)
    assert cause is not None
    text = render(cause)
    assert len(text.splitlines()) <= MOST_LINES
    assert headline(cause) in text.splitlines()[0]
    return cause


@pytest.mark.parametrize(
    ("name", "kind", "what", "remedy"),
    [
        ("sigkill", CauseKind.SIGNAL, "killed by SIGKILL", "dmesg"),
        ("sigsegv", CauseKind.SIGNAL, "killed by SIGSEGV", "stack"),
        ("sigterm", CauseKind.SIGNAL, "terminated by SIGTERM", "to the agent"),
        ("sigint", CauseKind.SIGNAL, "killed by SIGINT", "to the agent"),
        ("exit_3", CauseKind.EXIT_CODE, "exited with code 3", ""),
        ("exit_0", CauseKind.EARLY_EXIT, "exited with code 0", "same number of batches"),
        ("exception", CauseKind.EXCEPTION, "ValueError: expected 128 features, got 127", ""),
        ("exception_after_destroy", CauseKind.EXCEPTION, "KeyError: 'labels'", ""),
        ("shape_error", CauseKind.EXCEPTION, "inconsistent tensor size", ""),
        ("missing_module", CauseKind.EXCEPTION, "No module named 'apex'", "same packages"),
        ("loader_exception", CauseKind.EXCEPTION, "'/data/img_17.png'", "every machine mounts"),
        ("loader_sigkill", CauseKind.EXCEPTION, "DataLoader worker", "fewer DataLoader workers"),
        ("loader_unguarded", CauseKind.EXCEPTION, "DataLoader worker", "__main__"),
        ("loader_sigbus", CauseKind.EXCEPTION, "DataLoader worker", "--shm-size"),
        ("disk_full", CauseKind.EXCEPTION, "No space left on device", "free space"),
        ("disk_full_torch_save", CauseKind.EXCEPTION, "unexpected pos", "df -h"),
        ("too_many_files", CauseKind.EXCEPTION, "Too many open files", "ulimit -n"),
        ("allocation", CauseKind.EXCEPTION, "can't allocate memory", "memory limit"),
        ("no_cuda", CauseKind.EXCEPTION, "not compiled with CUDA", "built for CUDA"),
        ("no_nccl", CauseKind.EXCEPTION, "NCCL", "gloo backend"),
        ("gloo_interface", CauseKind.EXCEPTION, "eth7", "ip -br address"),
        ("gloo_interface_list", CauseKind.EXCEPTION, "^lo", "one name"),
        ("port_in_use", CauseKind.EXCEPTION, "EADDRINUSE", "ss -ltnp"),
        ("other_collective", CauseKind.EXCEPTION, "Detected mismatch", "same sequence"),
        ("other_shape", CauseKind.EXCEPTION, "Detected mismatch", "same sequence"),
        ("late_rank", CauseKind.HANG, "did not take part", "look at what"),
        ("late_at_barrier", CauseKind.HANG, "did not take part", "look at what"),
        ("never_joined", CauseKind.EARLY_EXIT, "exited with code 0", "batches"),
    ],
)
def test_a_failure_of_rank_0_is_found_and_explained(
    name: str, kind: CauseKind, what: str, remedy: str
) -> None:
    cause = found(reports(name))
    assert (cause.kind, cause.rank if not cause.where else 0) == (kind, 0)
    assert what in cause.what
    assert remedy in cause.remedy


@pytest.mark.parametrize(
    ("returncode", "what", "remedy"), [(3, "exited with code 3", ""), (-9, "was killed by SIGKILL", "dmesg")]
)
def test_a_warning_that_torch_logs_in_every_run_is_no_cause(returncode: int, what: str, remedy: str) -> None:
    name = "[W1123 06:22:33.86 socket.cpp:207] [c10d] The hostname of the client socket cannot be retrieved. err=-3"
    lookup = "[W1123 06:22:33.87 socket.cpp:767] [c10d] The IPv6 network addresses of (n1, 29500) cannot be retrieved"
    cause = found([report(0, worker(0, 0, End(returncode, 0.0, f"{lookup} (gai error: -2)\n{name}\n"), 1e9))])
    assert cause.what == what
    assert remedy in cause.remedy
    assert "DNS" not in cause.remedy
    assert "last output" not in render(cause)


@pytest.mark.parametrize(
    ("stdout", "where"),
    [
        ("/logs/0/output.log", r"elastic-agent logs n0/0 --generation 1 \(.*on host0: /logs/0/output.log\)"),
        ("/mine/n0.txt", "read the end of the output of worker n0/0, /mine/n0.txt, on host0"),
        (
            "",
            "output of worker n0/0 was beside the log of its agent on .*, in no file; --log-dir DIR keeps it",
        ),
    ],
    ids=["in a file", "in a file of the user's own", "with the agent's"],
)
def test_output_that_is_to_be_read_is_said_to_be_where_it_is(stdout: str, where: str) -> None:
    exits = replace(worker(0, 0, End(3, 0.0, ""), 1e9), stdout=stdout)
    cause = found([report(0, exits)])
    assert re.search(where, cause.next_step), cause.next_step


def test_a_rank_that_waits_for_something_else_is_named() -> None:
    cause = found(reports("waits_in_store"))
    assert (cause.kind, cause.rank, cause.is_certain) == (CauseKind.HANG, 1, False)


def test_an_unknown_host_is_recognised_by_the_warning_before_the_error() -> None:
    cause = found(reports("unknown_host"))
    assert "cannot be resolved" in cause.meaning
    assert cause.where == "on 2 of 2 workers"


OWN = [
    *(
        "sigkill",
        "sigsegv",
        "sigterm",
        "exit_3",
        "exit_0",
        "exception",
        "exception_after_destroy",
        "shape_error",
    ),
    *("loader_exception", "disk_full", "too_many_files", "allocation", "no_cuda"),
]
CONSEQUENCES = [
    scene(name)[rank]
    for name in (*OWN, "waits_in_store", "late_rank")
    for rank in (1, 2)
    if rank in scene(name)
]
"""Ends of ranks that lost the connection to another rank."""
FASTER_THAN_CONSEQUENCES = {"exit_0"}
"""A worker that exits with 0 is the cause only of what comes later."""


def drawn(seed: int) -> tuple[list[NodeReport], str, int]:
    """A failure of 6 workers on 3 nodes: a random one first, and some consequences within 50 ms, before or after it."""
    rng = random.Random(seed)
    name, culprit = rng.choice(OWN), rng.randrange(6)
    failed_s = 1e9 + rng.random()
    workers: list[WorkerReport] = []
    for rank in range(6):
        early = rng.uniform(0.0, 0.05) if name in FASTER_THAN_CONSEQUENCES else rng.uniform(-0.025, 0.025)
        if rank == culprit:
            workers.append(worker(rank % 2, rank, scene(name)[0], failed_s))
        elif rng.random() < 0.6:
            workers.append(worker(rank % 2, rank, rng.choice(CONSEQUENCES), failed_s + early))
        else:
            stopped = End(rng.choice((-15, -9)), 0.0, "")
            workers.append(worker(rank % 2, rank, stopped, failed_s + 0.05, state=WorkerState.STOPPED))
    known = [report(node, *workers[2 * node : 2 * node + 2]) for node in range(3)]
    rng.shuffle(known)
    return known, name, culprit


@pytest.mark.parametrize("seed", range(50))
def test_the_first_cause_is_found_among_failures_within_50_ms(seed: int) -> None:
    known, name, culprit = drawn(seed)
    cause = found(known)
    assert cause.rank == culprit, name


def test_of_several_failures_of_their_own_the_earliest_is_the_cause() -> None:
    cause = found(each(("disk_full", 0.04), ("exception", 0.02), ("sigkill", 0.03)))
    assert cause.worker == "n1/0"
    assert "n2/0 (rank 2) failed too 10 ms later: was killed by SIGKILL" in cause.others
    assert any("No space left" in line for line in cause.others)


def test_a_failure_counts_from_when_it_happened_and_not_from_the_end_of_the_process() -> None:
    """Python needs some time to end; a process that is killed, too."""
    slow, killed = {"failed_s": 1e9}, {"failed_s": 1e9 + 0.01}
    cause = found(each(("exception", 0.4, slow), ("sigkill", 0.03, killed), ("exit_3", 0.02)))
    assert cause.worker == "n0/0"
    assert "n1/0 (rank 1) failed too 10 ms later: was killed by SIGKILL" in cause.others


HIDDEN = End(
    1, 0.0, 'Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: training failed\n'
)


@pytest.mark.parametrize("end", [HIDDEN, End(1, 0.0, "training failed\n"), End(1, 0.0, "")])
def test_an_error_that_replaced_that_of_a_broken_connection_is_a_consequence(end: End) -> None:
    """As by ``raise ValueError from None`` or ``sys.exit(1)`` in a handler: no traceback shows it."""
    origin = scene("sigkill")[1].stderr.splitlines()[-1].removeprefix("[rank1]: ")
    for noted, rank in ((origin, 0), ("KeyError: 'label'", 1)):
        assert found(each(("sigkill", 0.03), (end, 0.0, {"origin": noted}))).rank == rank


@pytest.mark.parametrize(
    ("broke_s", "exited_s", "rank"),
    [(0.02, 0.0, 0), (0.35, 0.0, 1), (0.02, 0.015, 1)],
    ids=["others needed it", "nothing broke before", "it exited later"],
)
def test_an_exit_with_0_is_the_cause_if_connections_broke_before_a_later_failure_could_break_them(
    broke_s: float, exited_s: float, rank: int
) -> None:
    failed, broken = {"failed_s": 1e9 + 0.01}, {"failed_s": 1e9 + broke_s}
    lost = end_of_connection("10.0.0.0")
    cause = found(each(("exit_0", exited_s), ("exception", 0.3, failed), (lost, 0.4, broken)))
    assert cause.rank == rank
    assert cause.is_certain == (rank == 1)


@pytest.mark.parametrize(("earlier_s", "rank"), [(0.013, 0), (0.5, 1)], ids=["shortly before", "long before"])
def test_of_two_exits_with_0_shortly_after_one_another_the_first_is_the_cause(
    earlier_s: float, rank: int
) -> None:
    """No connections are known to have broken but those to the later one."""
    known = each(
        ("exit_0", 0.02, {"failed_s": 1e9 - earlier_s}),
        ("exit_0", 0.01, {"failed_s": 1e9}),
        ("exception", 0.3, {"failed_s": 1e9 + 0.036}),
        (end_of_connection("10.0.0.1"), 0.4, {"failed_s": 1e9 + 0.01}),
    )
    assert found(known).rank == rank


def test_identical_errors_are_folded() -> None:
    end = scene("disk_full")[0]
    known = [
        report(0, worker(0, 0, end, 1e9), worker(1, 1, end, 1e9 + 0.01)),
        report(1, worker(0, 2, scene("disk_full")[1], 1e9 + 0.02)),
    ]
    assert found(known).where == "on 2 of 3 workers, only on host0"


@pytest.mark.parametrize(
    ("name", "facts", "kind", "meaning"),
    [
        ("sigkill", {"oom_kills": "1", "memory_limit": "2.0 GB"}, CauseKind.OUT_OF_MEMORY, "limit 2.0 GB"),
        ("sigkill", {"oom_kills": "0"}, CauseKind.SIGNAL, ""),
        ("loader_sigkill", {"oom_kills": "2"}, CauseKind.OUT_OF_MEMORY, "the kernel killed it"),
        (
            "disk_full",
            {"disk_full": "/data: 0 B of 1 TB free"},
            CauseKind.EXCEPTION,
            "/data: 0 B of 1 TB free",
        ),
    ],
    ids=["a worker", "no kill by the kernel", "a process of a data loader", "a full disk"],
)
def test_a_kill_for_memory_and_a_full_disk_are_explained_by_what_was_observed_on_the_machine(
    name: str, facts: dict[str, str], kind: CauseKind, meaning: str
) -> None:
    cause = found(reports(name, **facts))
    assert cause.kind is kind
    assert meaning in cause.meaning
    assert ("memory" in render(cause)) == (kind is CauseKind.OUT_OF_MEMORY)


def test_a_worker_that_was_stopped_after_it_had_failed_is_the_cause() -> None:
    """The others may exit sooner than the worker whose exception made their connections break."""
    failed = End(-15, 0.0, scene("exception")[0].stderr)
    cause = found(each((failed, 0.5, {"state": WorkerState.STOPPED}), (scene("exception")[1], 0.0)))
    assert (cause.rank, cause.kind) == (0, CauseKind.EXCEPTION)
    assert not cause.is_certain


LINK = "\n\nDuring handling of the above exception, another exception occurred:\n\n"
FOLLOWED = """Traceback (most recent call last):
  File "/job/train.py", line 9, in <module>
    main()
ValueError: training failed
"""


@pytest.mark.parametrize(
    ("first", "second", "rank"), [("connection", "own", 0), ("own", "connection", 1)], ids=str
)
def test_of_a_chain_of_exceptions_the_first_one_decides(first: str, second: str, rank: int) -> None:
    """A collective in a `finally` fails because the exception reached other ranks, too."""
    texts = {"connection": scene("sigkill")[1].stderr, "own": FOLLOWED}
    chained = End(1, 0.0, f"{texts[first]}{LINK}{texts[second]}")
    other = "sigkill" if rank == 0 else scene("sigkill")[1]
    cause = found(each((other, 0.0), (chained, 0.03)))
    assert (cause.rank, "training failed" in cause.what) == (rank, rank == 1)


def test_of_a_chain_without_a_collective_the_last_one_decides() -> None:
    chained = End(1, 0.0, f"{FOLLOWED.replace('training failed', 'no such option')}{LINK}{FOLLOWED}")
    assert found([report(0, worker(0, 0, chained, 1e9))]).what == "ValueError: training failed"


# -- harmless lines ---------------------------------------------------------------------------------

SCENES = sorted(file.stem for file in TEXTS.glob("*.txt"))


def noisy(end: End, before: str, after: str) -> End:
    return replace_end(end, stderr=f"{before}{end.stderr}\n{after}")


def told(cause: RootCause | None) -> tuple[object, ...]:
    """All that is said of a cause but the last line of an output, which is quoted as such."""
    if cause is None:
        return ()
    what = cause.what.partition("; its last line: ")[0]
    return (
        cause.kind,
        cause.worker,
        what,
        cause.where,
        cause.line,
        cause.meaning,
        cause.remedy,
        cause.is_certain,
    )


@pytest.mark.parametrize("name", SCENES)
@pytest.mark.parametrize("where", ["before", "after"])
def test_harmless_lines_beside_an_error_do_not_change_the_cause(name: str, where: str) -> None:
    expected = told(root_cause(reports(name)))
    for line in HARMLESS:
        before, after = (f"{line}\n", "") if where == "before" else ("", f"{line}\n")
        known = [
            report(rank, worker(0, rank, noisy(end, before, after), 1e9 + end.after_s))
            for rank, end in scene(name).items()
        ]
        assert told(root_cause(known)) == expected, line


@pytest.mark.parametrize("line", HARMLESS)
def test_harmless_lines_at_an_end_without_an_error_explain_nothing(line: str) -> None:
    for returncode in (-9, -11, -7, 3, 1):
        quiet = found([report(0, worker(0, 0, End(returncode, 0.0, "step 7\n"), 1e9))])
        cause = found([report(0, worker(0, 0, End(returncode, 0.0, f"step 7\n{line}\n"), 1e9))])
        assert told(cause) == told(quiet)
        noted = describe(0, 1, "", f"{line}\n", noted="no data for fold 3")
        assert (noted.message, noted.recognised) == ("no data for fold 3", None)


def test_a_line_that_explains_an_end_without_an_error_is_called_possible() -> None:
    line = "OpenBLAS blas_thread_init: pthread_create failed for thread 3 of 64: Resource temporarily unavailable"
    cause = found([report(0, worker(0, 0, End(-11, 0.0, f"{line}\n"), 1e9))])
    assert cause.what == "was killed by SIGSEGV"
    assert cause.meaning == (
        f"crash in native code; possibly the limit of processes and threads is reached, as it wrote: {line}"
    )
    assert "ulimit -u" in cause.remedy


def test_the_error_that_ended_the_script_is_the_cause_and_not_one_that_was_caught_and_logged() -> None:
    caught = scene("disk_full")[0].stderr
    failure = describe(0, 1, "", f"{caught}\nno data for fold 3\n", noted="no data for fold 3")
    assert (failure.message, failure.recognised) == ("no data for fold 3", None)


# -- nodes ----------------------------------------------------------------------------------------


def plan(
    reason: str = "",
    failure: Failure | None = None,
    failed_node: str | None = None,
    lost: tuple[str, ...] = (),
) -> Plan:
    seats = tuple(Seat(f"n{node}", f"i{node}", f"10.0.0.{node}", 1, node) for node in range(3))
    world = World(1, seats, Address("10.0.0.0", 1234), "n0")
    return Plan(
        1, 2, Phase.FORMING, 2, reason, Policy(), world, failure=failure, failed_node=failed_node, lost=lost
    )


def end_of_connection(peer: str) -> End:
    return End(1, 0.0, scene("sigkill")[1].stderr.replace("[127.0.0.1]", f"[{peer}]"))


def broken(rank: int, peer: str = "10.0.0.2") -> NodeReport:
    return report(rank, worker(0, rank, end_of_connection(peer), 1e9))


def test_a_lost_node_is_the_cause_of_broken_connections() -> None:
    cause = found([broken(0), broken(1)], plan("any words", lost=("n2",)))
    assert (cause.kind, cause.node_id, cause.is_certain) == (CauseKind.NODE_LOST, "n2", True)
    assert headline(cause) == "root cause: node n2 was lost (10.0.0.2)"
    assert cause.next_step == (
        "when n2 is back, read what its workers wrote last: elastic-agent logs n2/0 --generation 1, there"
    )


@pytest.mark.parametrize(
    ("more", "then"),
    [
        ({}, "it joins the run"),  # which may have waited for it, if it hosted the store
        ({"policy": Policy(min_nodes=3, max_nodes=3)}, "the run waits for it"),
        ({"policy": Policy(max_nodes=3, node_counts=(3,))}, "the run waits for it"),
        ({"lost": ("n0", "n1", "n2")}, "the run waits for it"),
        ({"phase": Phase.FAILED}, ""),
    ],
)
def test_a_lost_node_is_told_how_to_come_back(more: dict[str, Any], then: str) -> None:
    ended = replace(plan("any words", lost=("n2",)), **{"policy": Policy(max_nodes=3), **more})
    remedy = found([broken(0), broken(1)], ended).remedy
    if then:
        assert remedy.endswith(f"; if its agent is gone, start the same command on n2 again: {then}")
    else:
        assert "start the same command" not in remedy


def test_a_node_without_a_report_is_the_probable_cause_of_broken_connections() -> None:
    cause = found([broken(0), broken(1)], plan("worker n0/0 exited with code 1: RuntimeError"))
    assert (cause.kind, cause.node_id, cause.is_certain) == (CauseKind.NODE_LOST, "n2", False)


def test_a_node_that_was_lost_while_it_trained_is_the_probable_cause_too() -> None:
    """Its last report says that its workers run."""
    trained = replace(report(2, WorkerReport(0, 2, WorkerState.RUNNING, 1)), is_final=False)
    cause = found([broken(0), broken(1), trained], plan("worker n0/0 exited with code 1: RuntimeError"))
    assert (cause.kind, cause.node_id, cause.is_certain) == (CauseKind.NODE_LOST, "n2", False)
    assert headline(cause) == "probable root cause: node n2 stopped reporting (10.0.0.2)"


def test_an_own_failure_is_the_cause_although_another_node_sent_no_report() -> None:
    killed = report(1, worker(0, 1, scene("sigkill")[0], 1e9))
    cause = found([broken(0, "10.0.0.1"), killed], plan("worker n1/0 was killed by SIGKILL"))
    assert cause.worker == "n1/0"
    assert "no report from n2" in cause.others


@pytest.mark.parametrize(
    ("how", "failed_s", "node_id"),
    [
        ("sigkill", 1e9 + 0.01, "n2"),
        ("sigkill", 1e9 - 0.01, "n1"),
        ("exit_3", 1e9 - 0.01, "n2"),
        ("exit_3", 1e9 - 0.3, "n1"),
    ],
)
def test_a_lost_node_comes_before_a_worker_that_failed_after_connections_to_the_node_broke(
    how: str, failed_s: float, node_id: str
) -> None:
    """One that exits without an error may have noticed the loss a little sooner."""
    killed = report(1, worker(0, 1, scene(how)[0], 1e9 + 0.02, failed_s=failed_s))
    blaming = report(
        0,
        worker(0, 0, end_of_connection("10.0.0.2"), 1e9),
        worker(1, 3, end_of_connection("10.0.0.1"), 1e9 + 0.02),
    )
    assert found([blaming, killed], plan("worker n1/0 was killed by SIGKILL")).node_id == node_id


def test_a_broken_connection_between_workers_that_ran_on_is_a_network_failure() -> None:
    running = report(2, WorkerReport(0, 2, WorkerState.STOPPED, 1, -15, 1e9 + 0.1))
    other = report(1, WorkerReport(0, 1, WorkerState.STOPPED, 1, -15, 1e9 + 0.1))
    cause = found([broken(0), other, running], plan())
    assert (cause.kind, cause.is_certain) == (CauseKind.NETWORK, False)
    assert cause.what == "n0/0 lost its connection to 10.0.0.2"
    assert re.search(r"^    RuntimeError: \w+.* \[10\.0\.0\.2\]:\d+", render(cause), re.MULTILINE), render(
        cause
    )


def test_workers_that_could_not_start_are_explained_by_the_plan() -> None:
    summary = "n1 could not start its workers: no such file: train.py"
    failure = Failure(FailureKind.START, summary, slot=0)
    cause = found([], plan(summary, failure, "n1"))
    assert (cause.kind, cause.node_id, cause.what) == (CauseKind.START, "n1", summary)


def test_a_hang_is_the_cause_and_the_waiting_workers_are_not() -> None:
    verdict = "is one all_reduce behind: number 4711, called at train.py:88"
    known = [
        report(0, WorkerReport(0, 0, WorkerState.HUNG)),
        report(1, WorkerReport(0, 1, WorkerState.HUNG, error=verdict)),
    ]
    cause = found(known)
    assert (cause.kind, cause.rank) == (CauseKind.HANG, 1)
    assert verdict in headline(cause)


def test_nothing_is_said_of_a_generation_in_which_nothing_failed() -> None:
    stopped = report(0, WorkerReport(0, 0, WorkerState.STOPPED, 1, -15, 1e9))
    done = report(1, WorkerReport(0, 1, WorkerState.SUCCEEDED, 1, 0, 1e9))
    assert root_cause([stopped, done]) is None
    assert root_cause([]) is None


def test_reports_of_another_generation_are_ignored() -> None:
    old = report(0, worker(0, 0, scene("sigkill")[0], 1e9))
    new = NodeReport("n1", "i1", 2, 1e9, workers=(worker(0, 1, scene("exception")[0], 1e9),))
    assert found([old, new]).worker == "n1/0"


@pytest.mark.parametrize("is_running", [True, False])
def test_the_failure_in_the_plan_counts_if_its_node_has_not_reported_it(is_running: bool) -> None:
    """The report may come too late, or never."""
    failed = describe(0, 1, "", scene("too_many_files")[0].stderr)
    failure = Failure(
        FailureKind.WORKER, "any words", failed.tail, slot=0, returncode=1, error=failed.message
    )
    late = [report(1, WorkerReport(0, 1, WorkerState.RUNNING))] if is_running else []
    cause = found([broken(0, "10.0.0.1"), *late, broken(2, "10.0.0.1")], plan(failure.summary, failure, "n1"))
    assert (cause.worker, cause.rank, cause.host) == ("n1/0", 1, "host1" if is_running else "10.0.0.1")
    assert cause.what == "OSError: [Errno 24] Too many open files: '/dev/null'"
    assert "ulimit -n" in cause.remedy


@pytest.mark.parametrize("words", ["worker n1/0 exited with code 3: no data (fold 3)", "any words", ""])
@pytest.mark.parametrize(
    ("returncode", "error", "what"),
    [
        (-9, "", "was killed by SIGKILL"),
        (3, "", "exited with code 3"),
        (1, "no data (fold 3)", "no data (fold 3)"),
        (1, "OSError: No space left on device", "OSError: No space left on device"),
    ],
)
def test_how_a_worker_ended_is_in_the_plan_whatever_its_words(
    words: str, returncode: int, error: str, what: str
) -> None:
    failure = Failure(FailureKind.WORKER, words, slot=0, returncode=returncode, error=error)
    cause = found([broken(0, "10.0.0.1")], plan(words, failure, "n1"))
    assert (cause.worker, cause.what, cause.is_certain) == ("n1/0", what, True)


@pytest.mark.parametrize("words", ["worker n1/1 (rank 1) is one all_reduce behind", "any words"])
@pytest.mark.parametrize("is_certain", [True, False])
def test_a_hang_is_attributed_to_the_worker_that_the_failure_names(words: str, is_certain: bool) -> None:
    """Every node announces the hang, so the node that was first is not to blame."""
    stopped = [report(node, WorkerReport(0, node, WorkerState.STOPPED, 1, -15, 1e9)) for node in range(3)]
    failure = Failure(FailureKind.HANG, words, culprit="n2", culprit_slot=0, is_certain=is_certain)
    cause = found([*stopped, broken(0)], plan(words, failure, "n0"))
    assert (cause.kind, cause.worker, cause.rank, cause.host) == (CauseKind.HANG, "n2/0", 2, "host2")
    assert (cause.what, cause.is_certain) == (words, is_certain)


def test_a_hang_of_nobody_in_particular_names_nobody() -> None:
    cause = found([], plan("any words", Failure(FailureKind.HANG, "worker n1/0"), "n1"))
    assert cause.worker == ""


@pytest.mark.parametrize(
    ("tail", "label"),
    [
        ('Traceback (most recent call last):\n  File "a.py", line 1, in f\nValueError: x', "traceback:"),
        ("Fatal Python error: Segmentation fault\n\nCurrent thread 0x1:", "traceback:"),
        ("Epoch 1: 100%\n/pkg/warn.py:1: UserWarning: slow", "last output:"),
    ],
)
def test_only_a_traceback_is_called_one(tail: str, label: str) -> None:
    killed = WorkerReport(0, 0, WorkerState.FAILED, 1, -9, 1e9, tail=tail)
    assert f"\n  {label}\n    {tail.splitlines()[0]}" in render(found([report(0, killed)]))


def test_what_is_cut_off_ends_with_an_ellipsis() -> None:
    source = f"    loss = criterion({', '.join(f'argument_{number}' for number in range(20))})"
    tail = f'Traceback (most recent call last):\n  File "a.py", line 1, in f\n{source}\nValueError: x'
    words = " ".join(f"word{number}" for number in range(100))
    cause = RootCause(1, CauseKind.EXCEPTION, "ValueError: x", remedy=words, tail=tail)
    lines = render(cause).splitlines()
    assert next(line for line in lines if "criterion" in line).endswith("…")
    assert [line for line in lines if "word" in line][-1].endswith(" …")
    whole = render(replace(cause, remedy=" ".join(words.split()[:30])))
    assert "word29" in whole
    assert " …" not in whole.replace("argument", "")[: whole.index("Traceback")]


def test_generations_that_failed_in_the_same_way_are_explained_once() -> None:
    def text(generation: int, what: str) -> tuple[int, str]:
        return generation, f"root cause: worker a/0 (rank 0): {what}\n  others: b/0 {what}"

    same = [text(number, f"lost 10.0.0.1:{4000 + number}") for number in (1, 2, 3)]
    known = [*same, text(4, "KeyError: 'bird'"), text(6, "KeyError: 'bird'")]
    assert folded(known) == [
        "generations 1 to 3: root cause: worker a/0 (rank 0): lost 10.0.0.1:4003\n  others: b/0 lost 10.0.0.1:4003",
        f"generation 4: {known[3][1]}",
        f"generation 6: {known[4][1]}",
    ]
    assert folded([]) == []
