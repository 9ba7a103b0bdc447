"""Finds the worker that all others wait for, from what their flight recorders and stacks show. Pure.

A worker that waits in a collective depends on every rank of its process group that has not called this collective yet.
The cause is a rank that others depend on, and that waits in no collective itself.
"""

from __future__ import annotations

import enum
from collections import Counter
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace

import msgspec

from elastic_agent.diagnosis.records import Collective, GroupProgress, NodeReport, WorkerReport, WorkerState
from elastic_agent.printable import listed, size_text

from .collective_calls import described, first_difference, known_calls, ranks_text

DATA_LOADER = "torch/utils/data/"
"""Part of the path of every module of torch's data loader, in a stack."""

MAKE_GROUPS = frozenset({"init_process_group", "new_group"})
"""Functions that end when the ranks of a new group are connected."""

LONGEST_SUMMARY = 512

_ON_SEVERAL_MACHINES = (
    "the workers do not reach each other; let the machines connect to each other on all ports (firewall), and "
    "set GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME to the interface of that network, or unset them"
)
_ON_ONE_MACHINE = (
    "the workers, which are all on this machine, do not meet; call it without init_method and store, and leave "
    "MASTER_ADDR and MASTER_PORT as the agent sets them: nobody listens on a port that the script chooses, as under a "
    "launcher no worker hosts a store"
)

_SHOWN_NAMES = 16
"""Before a stack."""

SHOWN_FRAMES = 12
"""Of each stack in the details: the innermost."""


class HangKind(enum.StrEnum):
    """Why the workers wait."""

    STOPPED = "stopped"
    """A process was stopped by a signal or a debugger."""
    EXITED = "exited"
    """A worker has ended with 0; the others wait for it."""
    EXCEPTION = "exception"
    """A worker raised an exception, and waits in a ``finally``, an ``except`` or a ``with`` while it handles it."""
    MISMATCH = "mismatch"
    """The ranks of a group have called different collectives."""
    DATA_LOADER = "data-loader"
    """A worker waits for its data loader, and the others for it."""
    BEHIND = "behind"
    """A worker is elsewhere, and has not called the collective in which the others wait."""
    CROSSED = "crossed"
    """Ranks wait for each other in different groups."""
    TRANSPORT = "transport"
    """All ranks have called the same collective, and it does not complete."""


@dataclass(frozen=True)
class Culprit:
    """A worker that others wait for."""

    rank: int
    node_id: str
    """Empty: no node has reported it."""
    slot: int


@dataclass(frozen=True)
class Hang:
    """Why the workers of a generation make no progress."""

    kind: HangKind
    culprits: tuple[Culprit, ...]
    """By rank; empty if no worker can be named."""
    summary: str
    """One line: the workers to blame, what the others wait for, and what to do."""
    continued_by: str = ""
    """Commands that continue the workers, as long as they have not been killed."""
    details: str = ""
    """Several lines: where all ranks are, and their stacks."""

    @property
    def summary_now(self) -> str:
        """The summary while the workers hang."""
        return f"{self.summary}: {self.continued_by}" if self.continued_by else self.summary


def find_hang(reports: Collection[NodeReport], world_size: int) -> Hang | None:
    """Find why nothing progresses, from one report per node on the same generation.

    Returns:
        None if no worker waits for others: then there may be a long step, but no hang.
    """
    return _Comparison(reports, world_size).result()


def find_standstill(reports: Collection[NodeReport], world_size: int) -> Hang | None:
    """Find a hang as :func:`find_hang` does, unless the workers of a node make progress."""
    if not all(map(stands_still, reports)):
        return None
    return find_hang(reports, world_size)


def where_all_are(reports: Collection[NodeReport], world_size: int) -> str:
    """Tell where every rank is, with the stacks, as in the details of a hang."""
    return _Comparison(reports, world_size).details()


def stands_still(report: NodeReport) -> bool:
    """Return whether the workers of the node make no progress, or have ended."""
    return report.is_final or report.stalled_s is not None


class _Comparison:
    def __init__(self, reports: Collection[NodeReport], world_size: int) -> None:
        self.nodes = {worker.rank: report.node_id for report in reports for worker in report.workers}
        self.workers = {worker.rank: worker for report in reports for worker in report.workers}
        self.hosts = {report.host or report.node_id for report in reports}
        self.ranks = sorted({*range(world_size), *self.workers})
        names = {progress.group for worker in self.workers.values() for progress in worker.progress}
        members = {name: self._members(name) for name in sorted(names)}
        self.groups = {
            name: group
            for name, group in members.items()
            if any(progress.is_waiting for progress in group.values())
        }
        """Groups in which a rank waits: the progress of each rank in it."""
        self.waiting = {
            rank for group in self.groups.values() for rank, progress in group.items() if progress.is_waiting
        } | {rank for rank, worker in self.workers.items() if worker.waits_in and not worker.is_silent}

    def _members(self, name: str) -> dict[int, GroupProgress]:
        known = {
            rank: _as_known(progress, worker)
            for rank, worker in self.workers.items()
            for progress in worker.progress
            if progress.group == name
        }
        ranks = next((progress.ranks for progress in known.values() if progress.ranks), tuple(self.ranks))
        return {rank: known.get(rank, GroupProgress(name)) for rank in ranks}

    def result(self) -> Hang | None:
        if not self.waiting:
            return None
        found = self._stopped() or self._mismatch() or self._behind() or self._not_called()
        return (found and self._handling(found)) or found or self._transport()

    # -- causes ---------------------------------------------------------------------------------

    def _stopped(self) -> Hang | None:
        ranks = sorted(
            rank for rank, worker in self.workers.items() if worker.process_state[:1] in ("T", "t")
        )
        if not ranks:
            return None
        pids = ", ".join(f"kill -CONT {self.workers[rank].pid} on {self.nodes[rank]}" for rank in ranks)
        summary = f"{self._named(ranks)} {_are(ranks)} stopped by a signal (SIGSTOP, SIGTSTP) or a debugger"
        return replace(self._hang(HangKind.STOPPED, ranks, summary), continued_by=pids)

    def _mismatch(self) -> Hang | None:
        for group in self.groups.values():
            found = first_difference({rank: known_calls(progress) for rank, progress in group.items()})
            if found is not None:
                return self._mismatched(*found)
        return None

    def _mismatched(self, serial: int, at: Mapping[int, Collective], parts: list[list[int]]) -> Hang:
        ranks = [rank for part in parts[1:] for rank in part]
        own, others = at[ranks[0]], at[parts[0][0]]
        summary = (
            f"{self._named(ranks)} called {described(own)}{self._line_of(own, ranks[0])} where "
            f"{ranks_text(parts[0])} called {described(others)}{self._line_of(others, parts[0][0])}, both with "
            f"sequence number {serial}: all ranks of a group must call the same collectives in the same order; "
            "conditions on the rank and uneven numbers of batches are common reasons"
        )
        return self._hang(HangKind.MISMATCH, ranks, summary)

    def _handling(self, found: Hang) -> Hang | None:
        """Find the exception because of which a worker has left the common sequence of collectives."""
        blamed = {culprit.rank for culprit in found.culprits}
        ranks = [rank for rank, worker in self.workers.items() if worker.handles]
        if found.kind is not HangKind.MISMATCH:  # there, the majority may be in the handler
            ranks = [rank for rank in ranks if rank in blamed]
        if found.kind in (HangKind.STOPPED, HangKind.EXITED) or not 0 < len(ranks) < len(self.workers):
            return None
        worker, others = self.workers[ranks[0]], [rank for rank in self.waiting if rank not in ranks]
        waits = f"waits in {worker.waits_in}" if worker.waits_in else "is"
        summary = f"{self._named(ranks[:1])} {waits}{_at(worker.line)} while it handles {worker.handles}"
        if worker.raised_at:
            summary += f" ({worker.raised_at})"
        if others:
            summary += f"; {ranks_text(others)} {_wait(others)} for it{_at(self._common_line(others))}"
        return self._hang(HangKind.EXCEPTION, ranks[:1], summary)

    def _behind(self) -> Hang | None:
        depends: dict[str, list[int]] = {}
        for name, group in self.groups.items():
            front = max(progress.enqueued for progress in group.values() if progress.is_waiting)
            late = [rank for rank, progress in group.items() if progress.enqueued < front]
            if late:
                depends[name] = late
        blocked = self._blocked()
        for name, late in depends.items():
            ranks = [rank for rank in late if rank not in blocked]
            if ranks:
                return self._late(name, ranks)
        if not depends:
            return None
        return self._connecting() or self._crossed(depends)

    def _blocked(self) -> set[int]:
        """Return the ranks in a collective that another rank has not called.

        Of one that all have called, the recorder may be late to note that it is complete.
        """
        inside = {rank for rank, worker in self.workers.items() if worker.waits_in}
        for group in self.groups.values():
            least = min(progress.enqueued for progress in group.values())
            inside |= {
                rank for rank, progress in group.items() if progress.is_waiting and progress.enqueued > least
            }
        return inside

    def _late(self, name: str, ranks: list[int]) -> Hang:
        """Tell how many collectives the last of these ranks are behind, who called the next one, and where."""
        group = self.groups[name]
        lowest = min(group[rank].enqueued for rank in ranks)
        ranks = [rank for rank in ranks if group[rank].enqueued == lowest]
        front = [
            rank for rank, progress in group.items() if progress.is_waiting and progress.enqueued > lowest
        ]
        kind, who = self._kind_of(ranks), self._named(ranks)
        if kind is HangKind.EXITED and lowest < 0:  # what it had called is not known
            whom = "it" if len(ranks) == 1 else "them"
            waiting = f"{ranks_text(front)} {_wait(front)} for {whom}{_at(self._common_line(front))}"
            return self._hang(kind, ranks, f"{who} exited with code 0; {waiting}")
        serial = max(lowest, 0) + 1
        missing = max(group[rank].enqueued for rank in front) - serial + 1
        calls = (call for rank in front for call in known_calls(group[rank]) if call.serial == serial)
        call = next(calls, Collective(serial, "collective"))
        count = f"one {call.name}" if missing == 1 else f"{missing} collectives"
        size = f"{size_text(call.size_bytes)}, " if call.size_bytes else ""
        called = f"called by {ranks_text(front)}{_at(call.line or self._common_line(front))}"
        summary = f"{who} {_are(ranks)} {count} behind: {size}sequence number {serial}, {called}"
        return self._hang(kind, ranks, f"{summary}{self._what_they_do(ranks)}")

    def _crossed(self, depends: Mapping[str, list[int]]) -> Hang:
        waiting = {
            name: [rank for rank, progress in self.groups[name].items() if progress.is_waiting]
            for name in depends
        }
        parts = [
            f"{ranks_text(waiting[name])} for {ranks_text(late)} in group {name}"
            for name, late in depends.items()
        ]
        summary = (
            f"ranks wait for each other: {', '.join(parts)}; call the collectives of different groups in the "
            "same order on all ranks"
        )
        return self._hang(HangKind.CROSSED, {rank for late in depends.values() for rank in late}, summary)

    def _not_called(self) -> Hang | None:
        """Find ranks elsewhere while others are in a function of torch.distributed that the recorder does not note."""
        inside = [rank for rank, worker in self.workers.items() if worker.waits_in]
        ranks = [rank for rank in self.ranks if rank not in self.waiting]
        if not inside or not ranks:
            return None
        function = Counter(self.workers[rank].waits_in for rank in inside).most_common(1)[0][0]
        summary = (
            f"{self._named(ranks)} {_are(ranks)} elsewhere while {ranks_text(inside)} {_wait(inside)} in "
            f"{function}{_at(self._common_line(inside))}{self._what_they_do(ranks)}"
        )
        return self._hang(self._kind_of(ranks), ranks, summary)

    def _connecting(self) -> Hang | None:
        """Find ranks that have not finished making a process group, where every rank waits for others."""
        ranks = [rank for rank, worker in self.workers.items() if worker.waits_in in MAKE_GROUPS]
        if not ranks:
            return None
        function = self.workers[ranks[0]].waits_in
        is_local = len(self.hosts) == 1 and len(self.workers) == len(self.ranks)
        summary = (
            f"{self._named(ranks)} {_are(ranks)} still in {function}{_at(self._common_line(ranks))}: "
            f"{_ON_ONE_MACHINE if is_local else _ON_SEVERAL_MACHINES}"
        )
        return self._hang(HangKind.TRANSPORT, [], summary)

    def _transport(self) -> Hang:
        connecting = self._connecting()
        if connecting is not None:
            return connecting
        name, group = next(iter(self.groups.items()), ("", {}))
        call = next((progress.last for progress in group.values() if progress.last is not None), None)
        shown = (
            f"{described(call)}, sequence number {call.serial}" if call is not None else "the same collective"
        )
        where = f" of group {name}" if name else ""
        summary = (
            f"all ranks{where} have called {shown}, and it does not complete: a network or a GPU does not "
            "transfer data; test the connections between the nodes"
        )
        return self._hang(HangKind.TRANSPORT, [], summary)

    # -- texts ----------------------------------------------------------------------------------

    def _kind_of(self, ranks: list[int]) -> HangKind:
        known = [self.workers[rank] for rank in ranks if rank in self.workers]
        if known and all(worker.state is WorkerState.SUCCEEDED for worker in known):
            return HangKind.EXITED
        if known and all(DATA_LOADER in worker.stack for worker in known):
            return HangKind.DATA_LOADER
        return HangKind.BEHIND

    def _what_they_do(self, ranks: list[int]) -> str:
        """Tell what these ranks do, to be appended to a summary; empty if it is not the same, or not known."""
        actions = {
            _doing(self.workers[rank]) if rank in self.workers else "has not reported" for rank in ranks
        }
        action = actions.pop()
        return f"; {'it' if len(ranks) == 1 else 'each'} {action}" if action and not actions else ""

    def _named(self, ranks: Iterable[int]) -> str:
        names = [
            f"{self.nodes[rank]}/{self.workers[rank].slot} (rank {rank})"
            if rank in self.workers
            else f"rank {rank}"
            for rank in sorted(ranks)
        ]
        plural = "s" if len(names) > 1 else ""
        return f"worker{plural} {listed(names, 4)}"

    def _line_of(self, call: Collective, rank: int) -> str:
        """Tell where the call was made, if it is the one in which the rank waits now."""
        if call.line:
            return _at(call.line)
        worker = self.workers[rank]
        is_newest = any(
            progress.is_waiting and progress.enqueued == call.serial for progress in worker.progress
        )
        return _at(worker.line) if is_newest else ""

    def _common_line(self, ranks: Iterable[int]) -> str:
        lines = Counter(line for rank in ranks if rank in self.workers and (line := self.workers[rank].line))
        return lines.most_common(1)[0][0] if lines else ""

    def _hang(self, kind: HangKind, ranks: Iterable[int], summary: str) -> Hang:
        culprits = tuple(
            Culprit(rank, self.nodes.get(rank, ""), self.workers[rank].slot if rank in self.workers else 0)
            for rank in sorted(ranks)
        )
        return Hang(kind, culprits, summary[:LONGEST_SUMMARY], details=self.details())

    def details(self) -> str:
        """Tell where every rank is; ranks at the same place together, with their stack."""
        places: dict[tuple[str, str], list[int]] = {}
        for rank in self.ranks:
            worker = self.workers.get(rank)
            place = (_place(worker), worker.stack) if worker is not None else ("has not reported", "")
            places.setdefault(place, []).append(rank)
        lines = []
        for (where, stack), ranks in places.items():
            lines.append(f"{self._whose(ranks)}: {where}")
            lines.extend(f"    {line}" for line in stack.splitlines()[-SHOWN_FRAMES:])
        return "\n".join(lines)

    def _whose(self, ranks: list[int]) -> str:
        """Return the workers of a stack by name, and all their ranks."""
        names = [f"{self.nodes[rank]}/{self.workers[rank].slot}" for rank in ranks if rank in self.workers]
        if not names:
            return ranks_text(ranks)
        plural = "s" if len(names) > 1 else ""
        return f"worker{plural} {listed(names, _SHOWN_NAMES)} ({ranks_text(ranks)})"


def _as_known(progress: GroupProgress, worker: WorkerReport) -> GroupProgress:
    """Take a worker that does not answer to have called its last known collective, and to wait in it no longer."""
    return msgspec.structs.replace(progress, completed=progress.enqueued) if worker.is_silent else progress


def _doing(worker: WorkerReport) -> str:
    if worker.state is WorkerState.SUCCEEDED:
        return "exited with code 0"
    if worker.state is not WorkerState.RUNNING:
        return f"has {worker.state.value}"
    if worker.is_silent and worker.process_state[:1] == "D":
        return "waits for a disk or a file server (state D)"
    if worker.is_silent:
        return "does not answer: it is in a C call that holds Python's lock"
    if DATA_LOADER in worker.stack:
        return f"waits for its data loader{_at(worker.line)}"
    return f"is{_at(worker.line)}" if worker.line else ""


def _place(worker: WorkerReport) -> str:
    newest = max(worker.progress, key=lambda progress: progress.enqueued, default=None)
    collective = ""
    if newest is not None and newest.is_waiting:
        call = described(newest.last) if newest.last is not None else "a collective"
        collective = f"waits in {call}, sequence number {newest.enqueued}"
    elif worker.waits_in:
        collective = f"waits in {worker.waits_in}"
    elif newest is not None and newest.completed > 0:
        collective = f"has completed {newest.completed} collectives"
    if worker.process_state[:1] in ("T", "t"):
        return "stopped by a signal or a debugger (state T)"
    at = f"at {worker.line}" if worker.line else ""
    doing = at if collective and not worker.is_silent else _doing(worker)
    return ", ".join(filter(None, (collective, doing))) or "no collective yet"


def _at(line: str) -> str:
    return f" at {line}" if line else ""


def _are(ranks: list[int]) -> str:
    return "is" if len(ranks) == 1 else "are"


def _wait(ranks: Collection[int]) -> str:
    return "waits" if len(ranks) == 1 else "wait"
