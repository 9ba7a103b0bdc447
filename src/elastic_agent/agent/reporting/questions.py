"""Answers what users ask about workers. For those of other machines it goes through the store, which all agents reach.

Each agent looks from time to time whether it is asked. Nothing is written before; questions and answers are removed
when the answer was read, answers that nobody reads later.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import threading
from collections.abc import AsyncGenerator, Collection, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TypeVar

import msgspec
from msgspec.structs import replace

from elastic_agent.agent.control.socket import Answer, Question
from elastic_agent.agent.supervisor import Supervisor
from elastic_agent.agent.worker_group.collectives import Collectives
from elastic_agent.agent.worker_group.stacks import worker_stacks
from elastic_agent.printable import without_surrogates
from elastic_agent.rendezvous.reports import Reports
from elastic_agent.transport import ReportRecords, StoreLostError, TransportError, run_abandonable
from elastic_agent.workers.output.read_output import MOST_BYTES, read_output

LOOK_EVERY_S, NEXT_S, BUSY_S = 2.0, 0.5, 10.0
"""The time between looks whether this agent is asked; and after a question, when a user may follow, for so long."""

ANSWER_S, GATHER_EVERY_S = 8.0, 0.2
"""The time that the others may take, and the time between looks for their answers."""

MOST_OTHERS = 15
"""So many questions of other users to a node are kept, the newest."""

TOLD_S, READ_S = 60.0, 2.0
"""The time for which an answer stays that nobody reads, and the time that the disk may take."""

MOST_READINGS = 4
"""So many threads read at the same time: while a disk hangs, no more than these stay behind."""

T = TypeVar("T")


@dataclass(eq=False, repr=False)
class Questions:
    """One node's part in them: it answers, and asks for the users of this machine. For the event loop."""

    node_id: str
    reports: Reports
    """They lead to the store."""
    supervisor: Supervisor
    collectives: Collectives
    log_folder: str
    """Where the output of the run's workers is; empty: nowhere."""

    def __post_init__(self) -> None:
        self._stacks_one_at_a_time = asyncio.Lock()
        self._readings = threading.BoundedSemaphore(MOST_READINGS)
        self._closed = asyncio.Event()

    def close(self) -> None:
        """Ask no more."""
        self._closed.set()

    async def serve(self) -> None:
        """Answer the questions of the others, as long as the store answers."""
        answered, at_s, now_s = set[str](), -BUSY_S, asyncio.get_running_loop().time
        own = f"asked/{self.node_id}"
        while True:
            await asyncio.sleep(NEXT_S if now_s() - at_s < BUSY_S else LOOK_EVERY_S)
            with contextlib.suppress(TransportError):
                if not self.reports.is_connected:
                    continue
                notes = await self.reports.call(partial(ReportRecords.read_notes, names=[own]))
                questions = _decoded(tuple[Question, ...], notes.get(own)) or ()
                fresh = [question for question in questions if question.id not in answered]
                answered = {question.id for question in questions}
                for question in fresh:
                    at_s = now_s()
                    with contextlib.suppress(UnicodeError):  # of this question; the others are answered
                        data = msgspec.msgpack.encode(await self.answer(question))
                        tell = partial(ReportRecords.write_note, name=f"told/{question.id}", data=data)
                        await self.reports.call(partial(tell, lasts_s=TOLD_S))

    async def answer(self, question: Question) -> Answer:
        """Answer a question about the workers of this node."""
        progress, seat = self.supervisor.progress, self.supervisor.seat
        if question.do == "stacks" and progress is not None and progress.pids and seat is not None:
            workers = self.node_id, progress, seat.first_rank
            async with self._stacks_one_at_a_time:
                text = await worker_stacks(*workers, self.collectives, self.log_folder)
            return Answer(without_surrogates(text)[:MOST_BYTES])
        if question.do == "stacks":
            return Answer(f"node {self.node_id}: no worker runs at present")
        if question.do != "logs" or not self.log_folder:
            return Answer(
                f"node {self.node_id}: output is kept in no file (--logs-specs, or --log-dir /dev/null)"
            )
        try:
            output, known = await run_abandonable(partial(self._read, question), READ_S)
            return Answer(output=output, known=known)
        except (TransportError, OSError) as error:
            return Answer(without_surrogates(f"node {self.node_id}: {self.log_folder}: {error}"))

    def _read(self, question: Question) -> tuple[dict[str, str], dict[str, int]]:
        """Read the output that is asked for; may block."""
        if not self._readings.acquire(timeout=READ_S):
            raise StoreLostError(f"no answer within {READ_S:g} s")
        try:
            worker = self.node_id, question.slot, question.generation
            read = partial(read_output, Path(self.log_folder), question.known, *worker)
            return read(last_lines=question.lines, follows=question.follows)
        finally:
            self._readings.release()

    async def ask(self, question: Question, node_id: str | None) -> AsyncGenerator[Answer]:
        """Yield what a node answers, or all do (None), or once why it does not; again and again if it follows.

        Who follows gets an empty answer after each round: it cannot be sent when the client is gone, which ends this.
        """
        known: dict[str, dict[str, int]] = {}
        silent: Collection[str] = ()
        while not self._closed.is_set():
            seats = self.supervisor.world.seats if self.supervisor.world is not None else ()
            nodes = {seat.node_id for seat in seats} | {self.node_id}
            if node_id not in {None, *nodes, *known}:
                has = ", ".join(sorted(nodes))
                yield Answer(f"the run has no node {node_id} now; it has {has}", failed=True)
                return
            asked = {
                node: replace(question, id=secrets.token_hex(8), known=known.get(node, {}))
                for node in sorted(nodes if node_id is None else {node_id})
            }
            own = asked.pop(self.node_id, None)
            told = {self.node_id: await self.answer(own)} if own is not None else {}
            problem = f"no answer within {ANSWER_S:g} s: the machine is lost or slow, or its agent has another version"
            try:
                told |= await self._gather(asked, silent if node_id is None else ()) if asked else {}
            except TransportError as error:
                if self._closed.is_set():
                    break
                problem = f"not asked, as the store does not answer ({error})"
            for node, answer in told.items():
                known[node] = answer.known or known.get(node, {})
                yield replace(answer, done=False, node=node)
            for node in asked.keys() - told.keys() - {*silent}:
                yield Answer(f"node {node}: {problem}", done=False)
            silent = asked.keys() - told.keys()
            if not question.follows:
                break
            yield Answer(done=False)
            await asyncio.sleep(NEXT_S)
        if question.follows and node_id in {None, self.node_id}:
            last = replace(question, known=known.get(self.node_id, {}), follows=False)
            yield replace(await self.answer(last), done=False, node=self.node_id)
        if question.follows and known.keys() - {self.node_id}:
            yield Answer(
                "this agent ends; what others wrote last is in the files on their machines", done=False
            )
        yield Answer()

    async def _gather(self, asked: Mapping[str, Question], silent: Collection[str]) -> dict[str, Answer]:
        """Ask, and return the answers as soon as all nodes but the silent ones have answered, or the time is over."""
        told: dict[str, Answer] = {}
        await self._change(asked)
        for _ in range(round(ANSWER_S / GATHER_EVERY_S)):
            await asyncio.sleep(GATHER_EVERY_S)
            if self._closed.is_set():
                raise StoreLostError("this agent ends")
            missing = {f"told/{asked[node].id}": node for node in asked.keys() - told.keys()}
            found = await self.reports.call(partial(ReportRecords.read_notes, names=missing))
            told |= {missing[name]: _decoded(Answer, data) or Answer() for name, data in found.items()}
            if not asked.keys() - told.keys() - {*silent}:
                break
        await self._change(asked, are_over=True)
        over = [f"told/{question.id}" for question in asked.values()]
        await self.reports.call(partial(ReportRecords.remove_notes, names=over))
        return told

    async def _change(self, asked: Mapping[str, Question], *, are_over: bool = False) -> None:
        """Ask each node, or take that back, in a call of its own: those of hundreds of nodes take a while."""
        for node, question in asked.items():
            change = partial(_changed, question=question, is_over=are_over)
            await self.reports.call(partial(ReportRecords.change_note, name=f"asked/{node}", change=change))


def _changed(data: bytes | None, question: Question, *, is_over: bool) -> bytes:
    """Return the questions to a node with this one, or without it."""
    others = [other for other in _decoded(tuple[Question, ...], data) or () if other.id != question.id]
    return msgspec.msgpack.encode([*others[-MOST_OTHERS:], *(() if is_over else (question,))])


def _decoded(kind: type[T], data: bytes | None) -> T | None:
    """Return the record, if ``data`` is one."""
    with contextlib.suppress(msgspec.MsgspecError, UnicodeDecodeError, RecursionError):
        return msgspec.msgpack.decode(data, type=kind) if data and len(data) <= 4 * MOST_BYTES else None
    return None
