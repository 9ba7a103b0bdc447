"""A machine: a clock of its own rate, a disk that survives, and the processes that stop and die with it."""

from __future__ import annotations

import errno
from pathlib import Path

from elastic_agent.protocol.records import Plan
from elastic_agent.rendezvous.run_history import SAVE_TIMEOUT_S, RunHistoryStore
from elastic_agent.transport.blocking_call import DiskThread, DoNext, timed_out

from .kernel import Inbox, Kernel, Process, Routine

RUN = "run"


class DiskOfAProcess(RunHistoryStore):
    """The shipped queue of one process before its machine's disk, in virtual time."""

    def __init__(self, machine: Machine, process: Process) -> None:
        super().__init__(Path(machine.name), disk=DiskThread("disk", self._start))
        self._machine = machine
        self._process = process
        self._kernel = process.kernel

    def save_within_time(self, history: Plan) -> Routine:
        """:meth:`save` as a sub-routine of the calling task; what is on disk when it is done."""
        answered = Inbox(self._kernel)
        outcome = self.save_soon(RUN, history)
        outcome.add_done_callback(lambda _: answered.put((self._machine.disk,)))
        answer = yield answered, self._machine.real_s(SAVE_TIMEOUT_S)
        if answer is None:
            raise timed_out(SAVE_TIMEOUT_S)
        outcome.result()
        return answer[0]

    def _read(self, run_id: str) -> Plan | None:
        return self._machine.disk

    def _replace(self, run_id: str, known: Plan | None, history: Plan) -> None:
        self._machine.write(history)

    def _start(self, do_next: DoNext) -> None:
        self._process.spawn(self._work(do_next))

    def _work(self, do_next: DoNext) -> Routine:
        """Carry out what waits for the disk, as the process's thread does."""
        machine, is_next = self._machine, True
        while is_next:
            if machine.disk_takes_s and self._kernel.random.random() < machine.slow_writes:
                yield machine.real_s(machine.disk_takes_s)
            is_next = do_next()


class Machine:
    """One machine of the simulated universe."""

    def __init__(self, kernel: Kernel, name: str, max_skew: float) -> None:
        random = kernel.random
        self.kernel = kernel
        self.name = name
        self.up = True
        self.paused = 0
        self.last_thaw_s = -1.0
        self.disk: Plan | None = None
        """What this machine's state directory says of the run."""
        self.disk_is_full = False
        self.not_on_disk: Plan | None = None
        """The newest of which a coordinator knows that it could not be written in time."""
        self.disk_takes_s, self.slow_writes = 0.0, 0.5
        """How long a slow write takes, and the share of slow writes."""
        self._queues: dict[Process, DiskOfAProcess] = {}
        self._rate = random.choice(
            (1.0 - max_skew, 1.0 + max_skew, 1.0 + random.uniform(-max_skew, max_skew))
        )
        self._offset_s = random.uniform(0.0, 1000.0)
        self._processes: list[Process] = []

    def clock(self) -> float:
        """This machine's CLOCK_BOOTTIME."""
        return self._offset_s + self.kernel.now * self._rate

    def real_s(self, duration_s: float) -> float:
        """Return how long a wait of ``duration_s`` by this machine's clock takes in truth."""
        return max(0.0, duration_s / self._rate)

    def process(self, name: str) -> Process:
        """Start a process here."""
        process = Process(self.kernel, name)
        for _ in range(self.paused):
            process.freeze()
        self._processes.append(process)
        return process

    def pause(self) -> None:
        """Freeze everything on this machine, as a suspended virtual machine does."""
        self.paused += 1
        for process in self._processes:
            process.freeze()

    def resume(self) -> None:
        """Let everything go on. Guards were started before their agents, and so wake first."""
        self.paused -= 1
        self.last_thaw_s = self.kernel.now
        self._processes = [process for process in self._processes if process.alive]
        for process in self._processes:
            process.thaw()

    def crash(self) -> None:
        """Power off."""
        self.up = False
        processes, self._processes = self._processes, []
        for process in processes:
            process.kill()

    def boot(self) -> None:
        """Power on; nothing runs yet."""
        self.up = True

    def history_store(self, process: Process) -> DiskOfAProcess:
        """Return what this process, its coordinator and its agent alike, uses the disk with."""
        if process not in self._queues:
            self._queues[process] = DiskOfAProcess(self, process)
        return self._queues[process]

    @property
    def disk_is_behind(self) -> bool:
        """Return whether a coordinator goes on although it could not write what it published."""
        known = self.not_on_disk
        return known is not None and (self.disk is None or self.disk.rank < known.rank)

    def write(self, history: Plan) -> None:
        """Replace what is on disk.

        Raises:
            OSError: it cannot be written.
        """
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.disk = history
