"""The workers of one generation, from their start until every process they left is gone.

Phases: RUNNING, then TERMINATING (signal sent, grace running), then KILLING (SIGKILL sent), then done;
each step can be skipped, none is ever taken back. A generation ends only by `stop` or `kill`, also when all
its workers have exited, because they may have left processes behind.

A `stop` may keep workers: then the generation ends as PARKED when nothing but these and their own processes is left.
From there it goes on to TERMINATING or KILLING, or the next generation takes the workers over.

The kernel shows whether all are gone: the guard is a subreaper, so as long as any descendant lives the guard has a
child.
"""

from __future__ import annotations

import os
import signal
import time

from elastic_agent import linux
from elastic_agent.workers.guard import cold, kept_workers
from elastic_agent.workers.guard.progress import LOOK_EVERY_S, StopProgress

TYPE_CHECKING = False
if TYPE_CHECKING:
    from collections.abc import Callable, Collection
    from types import SimpleNamespace

    from elastic_agent.linux import Process
    from elastic_agent.workers.guard.line import Loop, Message
    from elastic_agent.workers.guard.relay import Channels, Console
    from elastic_agent.workers.guard.warm import Standby, WarmPool

RUNNING, TERMINATING, KILLING, PARKED, DONE = "running", "terminating", "killing", "parked", "done"

_FIRST_RESCAN_S = 0.005
_LONGEST_RESCAN_S = 0.2
_SCANS_AT_ONCE = 20


class Worker:
    """A worker process that has not been reaped."""

    __slots__ = ("channels", "pid", "pidfd", "slot", "start_fd")

    def __init__(
        self,
        slot: int,
        pid: int,
        pidfd: int | None,
        start_fd: int,
        channels: Channels,
    ) -> None:
        self.slot = slot
        self.pid = pid
        self.pidfd = pidfd
        self.start_fd: int | None = start_fd
        self.channels = channels


class Generation:
    """Starts, signals, kills and reports one generation's workers.

    `abandoned` holds the keys of processes that an earlier generation could not get rid of (SIGKILL sent,
    asleep in the kernel); they are not waited for again. `pool`: where warm launches get their processes;
    those that have got none after `patience_s` start cold. `parked`: the workers of the generation before, by process;
    launches that name them have them go on.
    """

    def __init__(
        self,
        number: int,
        loop: Loop,
        console: Console,
        report: Callable[[Message], None],
        kill_patience_s: float,
        abandoned: set[tuple[int, int]],
        pool: WarmPool | None,
        patience_s: float,
        parked: dict[int, Worker],
    ) -> None:
        self.number = number
        self.phase = RUNNING
        self._loop = loop
        self._console = console
        self._report_now = report
        self._kill_patience_s = kill_patience_s
        self._abandoned = abandoned
        self._pool = pool
        self._to_start: list[SimpleNamespace] = []
        self._cold_at: float | None = time.monotonic() + patience_s
        self._parked = parked
        self._workers: dict[int, Worker] = {}
        self._kept: set[int] = set()
        """The processes of the workers that the stop under way spares."""
        self._pids: dict[int, int] = {}
        self._starting = True
        self._held_reports: list[Message] = []
        self._unread: list[tuple[Worker, Message]] = []
        """Ends of workers whose output the reader of stdout has not taken: without the guard, they would not have
        ended."""
        self._kill_at = 0.0
        self._progress: StopProgress | None = None
        self._next_look = 0.0
        self._terminated_groups: set[int] = set()
        self._terminated: set[tuple[int, int]] = set()
        self._killed: set[tuple[int, int]] = set()
        self._next_scan = 0.0
        self._scan_pause_s = _FIRST_RESCAN_S
        self._patience_ends = 0.0
        self._delays = 0

    # --- starting ---------------------------------------------------------------------------------

    def start(self, launches: list[SimpleNamespace]) -> None:
        """Fork all workers.

        `Spawned` is reported when every one runs its program, `SpawnFailed` when one cannot.
        """
        self._to_start = sorted(launches, key=lambda launch: launch.parked not in self._parked)
        self.start_more()

    def start_more(self) -> None:
        """Start what can be started now. Call again when the pool of standbys has changed."""
        while self._to_start and self._starting and self.phase == RUNNING:
            launch = self._to_start[0]
            try:
                if not self._start(launch):
                    return
            except OSError as error:
                self._start_failed(launch.slot, f"cannot create a process: {error.strerror}")
                return
            del self._to_start[0]
        if self._starting and self.phase == RUNNING and not self._any_unknown():
            self._all_started()

    def _start(self, launch: SimpleNamespace) -> bool:
        """Start a worker if that is possible now, and return whether it was; if not, a standby is being started."""
        pool = self._pool
        if launch.parked in self._parked:
            worker = self._parked.pop(launch.parked)
            self._console.move(worker.channels, launch)
            self._add_worker(worker)
            return True
        if not launch.warm or pool is None or not pool.usable or self._cold_at is None:
            self._fork(launch)
            return True
        while (standby := pool.take(len(self._to_start))) is not None:
            try:
                self._hand_over(launch, standby)
            except (BrokenPipeError, ConnectionResetError):  # it has just died, and is reaped soon
                pool.discard(standby)
                continue
            except BaseException:
                pool.discard(standby)
                raise
            pool.used()
            return True
        return False

    def _hand_over(self, launch: SimpleNamespace, standby: Standby) -> None:
        from elastic_agent.workers.guard import warm  # loaded already, where there are standbys

        channels = self._console.open(launch)
        try:
            start_fd = warm.hand_over(standby, launch, channels.fds)
        finally:
            channels.started()
        self._add_worker(Worker(launch.slot, standby.pid, standby.pidfd, start_fd, channels))

    def _fork(self, launch: SimpleNamespace) -> None:
        channels = self._console.open(launch)
        try:
            pid, start_fd = cold.start_cold_worker(launch, channels.fds)
        finally:
            channels.started()
        self._add_worker(Worker(launch.slot, pid, cold.open_pidfd(pid), start_fd, channels))

    def _add_worker(self, worker: Worker) -> None:
        self._workers[worker.pid] = worker
        self._pids[worker.slot] = worker.pid
        if worker.start_fd is not None:
            self._loop.add(worker.start_fd, lambda: self._start_known(worker))
        if worker.pidfd is not None:
            self._loop.add(worker.pidfd, lambda: self.reap(worker.pid))

    def _start_known(self, worker: Worker) -> None:
        if worker.start_fd is None:
            return
        error = cold.read_start_error(worker.start_fd)
        if error is None:
            return
        self._loop.remove(worker.start_fd)
        os.close(worker.start_fd)
        worker.start_fd = None
        if error:
            del self._pids[worker.slot]  # it never became a worker, so its end is not reported
            self._start_failed(worker.slot, error)
        elif self._starting and not self._to_start and not self._any_unknown():
            self._all_started()

    def _any_unknown(self) -> bool:
        """Return whether it is not known yet of some worker whether it could be started."""
        return any(worker.start_fd is not None for worker in self._workers.values())

    def _all_started(self) -> None:
        self._starting = False
        if self._pool is not None:
            self._pool.refill_later()
        self._report_now({"event": "Spawned", "generation": self.number, "pids": self._pids})
        self._release_reports()

    def _start_failed(self, slot: int, error: str) -> None:
        if self._starting:
            self._starting = False
            message = {"event": "SpawnFailed", "generation": self.number, "slot": slot, "error": error}
            self._report_now(message)
            self._release_reports()
            self.kill()

    # --- reports ----------------------------------------------------------------------------------

    def _report(self, message: Message) -> None:
        """Report an event, exits only after the start: the agent receives a worker's events in order."""
        if self._starting:
            self._held_reports.append(message)
        else:
            self._report_now(message)

    def _release_reports(self) -> None:
        for message in self._held_reports:
            self._report_now(message)
        self._held_reports.clear()

    # --- exits ------------------------------------------------------------------------------------

    def owns(self, pid: int) -> bool:
        return pid in self._workers

    def announces(self, pid: int) -> bool:
        """Return whether the loop will handle this worker's death in order: do not reap it before."""
        return pid in self._workers and self._workers[pid].pidfd is not None

    def reap(self, pid: int) -> None:
        """Collect and report a worker that has ended."""
        worker = self._workers[pid]
        self._start_known(worker)  # before the pid can be reused
        try:
            reaped, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # a standby that died while it was still being adopted: it is reaped later
            return
        if not reaped:
            return
        at_boottime_s = linux.boottime_s()
        del self._workers[pid]
        self._kept.discard(pid)
        if worker.pidfd is not None:
            self._loop.remove(worker.pidfd)
            os.close(worker.pidfd)
        returncode = os.waitstatus_to_exitcode(status)
        waits = returncode >= 0 and self.phase == RUNNING and not worker.channels.is_taken()
        if not waits:
            worker.channels.drain()
        if self._pids.get(worker.slot) != pid:  # it never became a worker
            return
        message: Message = {
            "event": "Exited",
            "generation": self.number,
            "slot": worker.slot,
            "pid": pid,
            "returncode": returncode,
            "at_boottime_s": at_boottime_s,
            "stopping": self.phase != RUNNING,
            "stderr_tail": worker.channels.tail if returncode != 0 else "",
        }
        if waits:
            self._unread.append((worker, message))
        else:
            self._report(message)

    def report_read(self) -> None:
        """Report the ends that waited for the reader of stdout, if it has taken all, or the generation is stopped."""
        unread, self._unread = self._unread, []
        for worker, message in unread:
            if self.phase == RUNNING and not worker.channels.is_taken():
                self._unread.append((worker, message))
            else:
                self._report(message)

    def after_reaping(self, childless: bool, news: bool) -> None:
        """Call when the guard has reaped what there was.

        `childless`: it has no child any more. `news`: a process may have died, or been signalled, since the last
        call.
        """
        if self.phase == RUNNING or self.phase == DONE:
            return
        if self.phase == PARKED:
            if not self._workers:
                self.kill()  # what they have left
        elif childless:
            self._finish(())
        elif not news:
            return
        elif (self._abandoned or (self._kept and not self._leaving())) and not self._remaining():
            self._finish(())
        elif self.phase == KILLING:
            self._kill_descendants()
        elif not self._leaving():
            self._terminate_leftovers()

    # --- stopping ---------------------------------------------------------------------------------

    @property
    def is_over(self) -> bool:
        """True if all its workers have been sent SIGKILL, or are gone."""
        return self.phase == DONE or (self.phase == KILLING and not self._kept)

    def _leaving(self) -> list[Worker]:
        return [worker for worker in self._workers.values() if worker.pid not in self._kept]

    def all_go_on(self, launches: list[SimpleNamespace]) -> bool:
        """Return whether the launches name all parked workers."""
        return self._workers.keys() <= {launch.parked for launch in launches}

    def release(self) -> dict[int, Worker]:
        """Return the parked workers, by process, for the next generation; nothing is left here."""
        for worker in self._workers.values():
            if worker.pidfd is not None:
                self._loop.remove(worker.pidfd)
        self.phase = DONE
        return self._workers

    def stop(self, grace_s: float, signum: int, idle_s: float | None, keep: Collection[int] = ()) -> None:
        """Send `signum` to the workers now, SIGTERM to what they leave, and SIGKILL to all that is left after
        `grace_s`.

        With `idle_s`, also as soon as nothing of what is left has made progress for so long (`progress`). Workers that
        are still being started get no grace. Workers whose processes are in `keep` are spared, unless an earlier stop
        has not spared them.
        """
        lost = self.phase != RUNNING and not self._kept <= {*keep}
        self._kept = {*keep} & (self._workers.keys() if self.phase == RUNNING else self._kept)
        if self.phase == PARKED and not self._kept:
            self.phase = RUNNING
        for worker in list(self._workers.values()):
            self._start_known(worker)  # may wait in the loop behind this very command
        if grace_s <= 0 or self._starting or (lost and self.phase == KILLING):
            self._kill_leaving(again=lost)
        elif self.phase == RUNNING:
            self.phase = TERMINATING
            now = time.monotonic()
            self._kill_at = now + grace_s
            if idle_s is not None:
                self._progress = StopProgress(
                    [worker.pid for worker in self._leaving()],
                    signum,
                    idle_s,
                    self._remaining,
                    self._is_terminated,
                    now,
                )
                self._next_look = time.monotonic() + LOOK_EVERY_S
            for worker in self._leaving():
                self._ask_to_end(worker.pid, signum)
            if not self._leaving():
                self._terminate_leftovers()
        elif self.phase == TERMINATING:
            self._kill_at = min(self._kill_at, time.monotonic() + grace_s)

    def kill(self) -> None:
        """Send SIGKILL to the workers, kept ones too, and to every other descendant of the guard."""
        spared, self._kept = self._kept, set()
        self._kill_leaving(again=bool(spared))

    def _kill_leaving(self, *, again: bool = False) -> None:
        """Send SIGKILL to all but kept workers; once, unless there are more `again`."""
        if self.phase == DONE or (self.phase == KILLING and not again):
            return
        self.phase = KILLING
        for worker in self._leaving():
            _signal_group(worker.pid, signal.SIGKILL)
        self._kill_descendants()
        self._patience_ends = time.monotonic() + self._kill_patience_s
        if self._starting:  # not a failure to start: whoever ends them says why
            self._starting = False
            self._release_reports()

    def _ask_to_end(self, worker: int, signum: int) -> None:
        """Signal the worker's own process, or its process group if that harms nothing.

        A worker that handles SIGTERM may need its children to complete its step: PyTorch raises an exception in it if
        a process of its data loader dies. One that does not handle it ends at once, and its children may do so with
        it. SIGINT comes from a terminal, which sends it to a whole group; shells, `subprocess` and data loaders rely
        on that.
        """
        if signum == signal.SIGINT:
            _signal_group(worker, signum)
        elif linux.ends_by(worker, signum):
            _signal_group(worker, signum)
            self._terminated_groups.add(worker)
        else:
            linux.send_signal(worker, signum)

    def _terminate_leftovers(self) -> None:
        """Send SIGTERM to what has outlived the workers, once."""
        for process in self._remaining():
            if not self._is_terminated(process):
                linux.send_signal(process.pid, signal.SIGTERM)
            self._terminated.add(process.key)

    def _is_terminated(self, process: Process) -> bool:
        """Return whether SIGTERM was sent to this process, which is no worker."""
        return process.key in self._terminated or process.group in self._terminated_groups

    def _remaining(self) -> list[Process]:
        found = [p for p in linux.descendants(os.getpid()) if p.key not in self._abandoned]
        if self._pool is not None:
            found = self._pool.without_own(found)
        if not self._kept:
            return found
        slots = {pid: self._workers[pid].slot for pid in self._kept}
        spared = kept_workers.family(slots, found, os.getpid())
        return [process for process in found if process.pid not in spared]

    def _kill_descendants(self) -> None:
        """Send SIGKILL, again until a scan shows no new process: one may fork between the scan and its death."""
        for _ in range(_SCANS_AT_ONCE):
            fresh = [p for p in self._remaining() if p.key not in self._killed]
            for process in fresh:
                linux.send_signal(process.pid, signal.SIGKILL)
                self._killed.add(process.key)
            if not fresh:
                break
        self._next_scan = time.monotonic() + self._scan_pause_s
        self._scan_pause_s = min(2 * self._scan_pause_s, _LONGEST_RESCAN_S)

    # --- time -------------------------------------------------------------------------------------

    def next_tick(self) -> float | None:
        """Return when `tick` is due, by time.monotonic()."""
        if self.phase == TERMINATING:
            return self._kill_at if self._progress is None else min(self._kill_at, self._next_look)
        if self.phase == KILLING:
            return min(self._next_scan, self._patience_ends)
        return self._cold_at if self._to_start and self._starting else None

    def tick(self) -> None:
        now = time.monotonic()
        if self.phase == TERMINATING and (now >= self._kill_at or self._stalled(now)):
            self._kill_leaving()
        elif self.phase == KILLING and now >= self._patience_ends:
            self._give_up_blocked()
        elif self.phase == KILLING and now >= self._next_scan:
            self._kill_descendants()
        elif self._to_start and self._cold_at is not None and now >= self._cold_at:
            self._cold_at = None
            importing = self._pool is not None and self._pool.overdue()
            self._report_now({"event": "WarmLate", "generation": self.number, "importing": importing})
            self.start_more()

    def _stalled(self, now: float) -> bool:
        """Return whether no more can come of the grace period."""
        if self._progress is None or now < self._next_look:
            return False
        goes_on = self._progress.look(now)
        self._next_look = time.monotonic() + LOOK_EVERY_S
        return not goes_on

    def _give_up_blocked(self) -> None:
        """Give up processes asleep in the kernel, which run no user code after SIGKILL; others are awaited."""
        self._kill_descendants()
        remaining = self._remaining()
        if all(process.state == "D" for process in remaining):
            self._abandoned.update(process.key for process in remaining)
            self._finish(tuple(sorted(process.pid for process in remaining)))
            return
        self._delays += 1
        if self._delays & (self._delays - 1) == 0:  # after one patience, two, four …
            alive = [_described(process) for process in remaining]
            waited_s = self._delays * self._kill_patience_s
            self._report(
                {"event": "StopDelayed", "generation": self.number, "alive": alive, "waited_s": waited_s}
            )
        self._patience_ends = time.monotonic() + self._kill_patience_s

    def _finish(self, unkillable: tuple[int, ...]) -> None:
        self.phase = PARKED if self._kept else DONE
        for worker in self._leaving():  # only unkillable ones
            for fd in (worker.pidfd, worker.start_fd):
                if fd is not None:
                    self._loop.remove(fd)
                    os.close(fd)
        self._workers = {pid: worker for pid, worker in self._workers.items() if pid in self._kept}
        self.report_read()
        self._console.close_all([worker.channels for worker in self._workers.values()])
        message: Message = {"event": "Stopped", "generation": self.number, "unkillable": unkillable}
        if self._kept:
            message["kept"] = {worker.slot: pid for pid, worker in self._workers.items()}
        self._report(message)


def _described(process: Process) -> dict[str, object]:
    """Return the fields of `client.Survivor`."""
    is_blocked = any(linux.thread_state(tid) == "D" for tid in linux.threads(process.pid))
    return {
        "pid": process.pid,
        "name": linux.process_name(process.pid),
        "state": "D" if is_blocked else process.state,
        "foreign_user": None if linux.may_signal(process.pid) else linux.user_of(process.pid),
    }


def _signal_group(leader: int, signum: int) -> None:
    try:
        os.killpg(leader, signum)
    except ProcessLookupError:
        linux.send_signal(leader, signum)  # just forked, has no group of its own yet
    except PermissionError:
        pass  # became another user; a stop is reported as delayed
