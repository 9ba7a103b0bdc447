"""A machine: a clock of its own rate, a disk that survives, and the processes that stop and die with it."""

from __future__ import annotations

import errno

import msgspec

from elastic_agent.protocol.records import History

from .kernel import Kernel, Process


class Machine:
    """One machine of the simulated universe."""

    def __init__(self, kernel: Kernel, name: str, max_skew: float) -> None:
        random = kernel.random
        self.kernel = kernel
        self.name = name
        self.up = True
        self.paused = 0
        self.last_thaw_s = -1.0
        self.disk: History | None = None
        """What this machine's state directory says of the run."""
        self.disk_is_full = False
        self.disk_is_behind = False
        """The last write failed."""
        self.disk_takes_s = 0.0
        """How long a coordinator waits until something is written."""
        self._rate = random.choice(
            (1.0 - max_skew, 1.0 + max_skew, 1.0 + random.uniform(-max_skew, max_skew))
        )
        self._offset_s = random.uniform(0.0, 1000.0)
        self._processes: list[Process] = []

    def clock(self) -> float:
        """This machine's CLOCK_BOOTTIME."""
        return self._offset_s + self.kernel.now * self._rate

    def real_s(self, duration_s: float) -> float:
        """How long a wait of ``duration_s`` by this machine's clock takes in truth."""
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

    def remember(self, history: History) -> None:
        """Keep the newest of what is known of the run on disk.

        Raises:
            OSError: it cannot be written.
        """
        if self.disk is not None and history.rank < self.disk.rank:
            return
        self.disk_is_behind = self.disk_is_full
        if self.disk_is_full:
            raise OSError(errno.ENOSPC, "no space left on device")
        self.disk = history

    def settle(self) -> None:
        """Its nodes' parts have ended in order: if the run on disk has an outcome, the next one of its name is another.

        Agents write that down when they end. Without other clients the simulator leaves it out, so that the record of
        the outcome in etcd has to do alone; a forger may delete that record, which leaves what is on disk.
        """
        if self.disk is not None and self.disk.outcome is not None and not self.disk_is_full:
            self.disk = msgspec.structs.replace(self.disk, settled=True)
