"""The workers of one generation: what starts them, where their output goes, and how they ended.

Nothing here waits. The guard's events are passed in (`handle`), the guard stops the workers, and closing the log files,
which waits for the readers of `--tee`, is left to a `BackgroundCloser`.
"""

from __future__ import annotations

import inspect
import os
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import TYPE_CHECKING, Any, TextIO

from elastic_agent import linux
from elastic_agent.logs import get_logger
from elastic_agent.workers import facts
from elastic_agent.workers.end import WorkerEnd
from elastic_agent.workers.guard.client import (
    Exited,
    Guard,
    GuardEvent,
    Launch,
    Spawned,
)
from elastic_agent.workers.output.tee import Tee

if TYPE_CHECKING:  # torch's are those of a plug-in (--logs-specs)
    from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs
    from torch.numa.binding import NumaOptions

    from elastic_agent.workers.output.generation_logs import Destinations, GenerationLogs


class BackgroundCloser:
    """Closes contexts in threads of their own: the readers of `--tee` need up to 0.1 s to end."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def submit(self, close: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=close, name="close-workers", daemon=True)
        thread.start()
        self._threads.append(thread)

    def drain_closing(self, timeout_s: float) -> bool:
        """Wait until all are closed, so that no output is lost; return False when they are not after `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, until_s - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


class WorkerContext:
    """One generation's workers.

    Args:
        guard: Starts the processes; its deadline must be set.
        generation: The generation's number, by which events are matched.
        name: Header of shown lines, as in "[name0]:", without `log_line_prefixes`.
        program: Program to run; `args` are its arguments by local rank.
        envs: Variables by local rank, on top of this process's own.
        logs_specs: Makes the log files; adds to `envs`.
        closer: Runs `close_later`.
        log_line_prefixes: Header of shown lines by local rank.
        duplicate_stdout_filters: Shown lines that contain one of these also go to a file for all workers.
        duplicate_stderr_filters: The same for standard error.
        warm: Fork them from the guard's spawner, if it has one; not together with `numa_options`.
        warm_patience_s: The longest time that they wait for a spawner that still imports.
        ignored_signals: Signals that they begin with ignored.
        startup_hook: Adapt frameworks in cold workers, too (`guard.cold.with_startup_hook`).
        started: The way in which they are started, for explanations.
        kept_bytes: The most that the file with kept output to the console may take; 0: there is no limit.
    """

    def __init__(
        self,
        guard: Guard,
        generation: int,
        name: str,
        program: str,
        args: Mapping[int, tuple[object, ...]],
        envs: Mapping[int, dict[str, str]],
        logs_specs: GenerationLogs | LogsSpecs,
        closer: BackgroundCloser,
        *,
        log_line_prefixes: Mapping[int, str] | None = None,
        duplicate_stdout_filters: Sequence[str] = (),
        duplicate_stderr_filters: Sequence[str] = (),
        numa_options: NumaOptions | None = None,
        warm: bool = False,
        warm_patience_s: float = 10.0,
        ignored_signals: tuple[int, ...] = (),
        startup_hook: bool = False,
        started: facts.Started = facts.UNKNOWN,
        kept_bytes: int = 0,
    ) -> None:
        self.generation = generation
        self._program = program
        self._args = args
        self._envs = dict(envs)
        self.parked: Mapping[int, int] = {}
        """By local rank, the parked processes that are to go on."""
        self._guard = guard
        self._closer = closer
        self._numa_options = numa_options
        self.warm = warm
        self._warm_patience_s = warm_patience_s
        self.ignored_signals = ignored_signals
        self._startup_hook = startup_hook
        self._how = started
        self._before: facts.Baseline | None = None
        self.pids: Mapping[int, int] = {}
        """The process ids by local rank; empty until all are started."""
        self.exits: dict[int, WorkerEnd] = {}
        """The ends of workers as far as they are known, by local rank, in the order in which they ended."""
        logs = logs_specs.reify(self._envs)
        self.stdouts, self.stderrs = logs.stdouts, logs.stderrs
        """The files of the workers' streams, by local rank; empty: the agent's own stream."""
        self.kept: Mapping[int, str] = getattr(logs, "kept", {})  # not in torch's
        """By local rank, the file in which output to the console is kept."""
        self._kept_bytes = kept_bytes
        self._error_files = logs.error_files
        headers = {slot: f"[{name}{slot}]:" for slot in args} | dict(log_line_prefixes or {})
        self._filtered: list[TextIO] = []
        self._tees = self._make_tees(logs, headers, duplicate_stdout_filters, duplicate_stderr_filters)

    def _make_tees(
        self,
        logs: Destinations | LogsDest,
        headers: Mapping[int, str],
        stdout_filters: Sequence[str],
        stderr_filters: Sequence[str],
    ) -> list[Tee]:
        """Return the readers that show the files of ``--tee``, and those that copy matching lines to one file."""
        header = headers.__getitem__
        tees = [Tee(logs.tee_stdouts, sys.stdout, header), Tee(logs.tee_stderrs, sys.stderr, header)]
        for filters, files, path in (
            (stdout_filters, logs.tee_stdouts, logs.filtered_stdout),
            (stderr_filters, logs.tee_stderrs, logs.filtered_stderr),
        ):
            if filters:
                self._filtered.append(open(path, "w", errors="replace", buffering=1))  # noqa: SIM115
                tees.append(Tee(files, self._filtered[-1], header, _contains_one_of(filters)))
        return tees

    def output_file(self, slot: int) -> str | None:
        """Return the file in which the worker's output is; empty: that of the agent. None: it wrote nothing.

        May block as long as a file system hangs.
        """
        kept = self.kept.get(slot, "")
        for path in (self.stdouts[slot] or _own_file(), self.stderrs[slot]):
            path = kept if kept and path in ("", os.devnull) else path
            # The guard makes the file in which it keeps output when there is some.
            has_content = os.path.getsize(path) > 0 if os.path.isfile(path) else not kept or path != kept
            if has_content:
                return path
        return None

    def with_files(self, end: WorkerEnd) -> WorkerEnd:
        """Return the end of a worker with what is in its files and with facts, if it failed.

        A package decides where the files are, so any error can occur; it is logged. May block as long as a file system
        hangs.
        """
        if end.is_read or end.returncode == 0:
            return end
        try:
            streams = {"stdout": self.stdouts[end.slot], "stderr": self.stderrs[end.slot]}
            files = {name: path for name, path in streams.items() if path not in ("", os.devnull)}
            known = facts.worker_facts(self._before) if self._before is not None else {}
            return replace(end.with_files(self._error_files[end.slot], files), facts=known)
        except Exception:
            get_logger().exception(f"cannot read the files of worker {end.slot}; the run continues")
            return replace(end, is_read=True)

    def machine_facts(self) -> dict[str, str]:
        """Return facts about the machine, compared with when the workers were started. Takes two seconds at most."""
        if self._before is None:
            return {}
        killed = [exited.pid for exited in self.exits.values() if exited.returncode < 0]
        folders = {os.path.dirname(path) for path in self._error_files.values()}
        return facts.machine_facts(self._before, killed, sorted(folders))

    def start(self) -> None:
        """Have the guard start the workers; it refuses while its last generation is not stopped yet."""
        launches = [self._launch(slot) for slot in range(len(self._args))]
        self._before = facts.baseline(self._how)
        self._guard.spawn(self.generation, launches, self._warm_patience_s)
        for tee in self._tees:
            tee.start()

    def _launch(self, slot: int) -> Launch:
        argv = (self._program, *(str(argument) for argument in self._args[slot]))
        return Launch(
            slot=slot,
            argv=_with_numa_binding(argv, slot, self._numa_options),
            env={**os.environ, **self.variables(slot)},
            stdout=self.stdouts[slot] or None,
            stderr=self.stderrs[slot] or None,
            kept=self.kept.get(slot),
            kept_bytes=self._kept_bytes,
            warm=self.warm,
            ignored=self.ignored_signals,
            startup_hook=self._startup_hook,
            parked=self.parked.get(slot),
        )

    def variables(self, slot: int) -> dict[str, str]:
        """Return a worker's variables, on top of this process's own."""
        return {name: str(value) for name, value in self._envs[slot].items()}

    def handle(self, event: GuardEvent) -> None:
        """Note the start or the end of workers; events of other generations are ignored."""
        match event:
            case Spawned(generation=self.generation, pids=pids):
                self.pids = pids
            case Exited(generation=self.generation, slot=slot):
                self.exits[slot] = WorkerEnd(**vars(event))

    @property
    def shows_output(self) -> bool:
        """Return whether files of the workers are shown while they grow (`--tee`)."""
        return any(tee.is_running for tee in self._tees)

    def show_output(self, timeout_s: float) -> None:
        """Show the output until now; waits for it, but not for longer than `timeout_s`."""
        until_s = time.monotonic() + timeout_s
        for shown in [tee.show_now() for tee in self._tees]:
            shown.wait(max(0.0, until_s - time.monotonic()))

    def close_later(self, closed: Callable[[], object] = lambda: None) -> None:
        """Show the rest of the output and close the log files, in the background; then call `closed` there.

        To be called when no process of the generation is left.
        """
        self._closer.submit(partial(self._close, closed))

    def _close(self, closed: Callable[[], object]) -> None:
        for tee in self._tees:
            tee.stop()
        for file in self._filtered:
            file.close()
        closed()


def _own_file() -> str:
    """Return the file that workers have as stdout from this process; empty if the guard passes their output on."""
    try:
        is_own = stat.S_ISREG(os.fstat(1).st_mode) and not linux.is_same_file(1, 2)
        return os.readlink("/proc/self/fd/1") if is_own else ""
    except OSError:
        return ""


def _contains_one_of(filters: Sequence[str]) -> Callable[[str], bool]:
    return lambda line: any(needle in line for needle in filters)


# --- private names of torch; a test says when a new version lacks one -----------------------------


def _with_numa_binding(argv: Sequence[str], local_rank: int, options: NumaOptions | None) -> tuple[str, ...]:
    """Return the command line that starts `argv` on the processors near the worker's GPU (`--numa-binding`)."""
    if options is None:
        return tuple(argv)
    from torch.numa.binding import _maybe_wrap_command_args_with_numa_binding

    wrap: Any = _maybe_wrap_command_args_with_numa_binding
    # torch 2.13 calls the device's index ``gpu_index``, later versions ``device_index``.
    known = inspect.signature(wrap).parameters
    index = next(name for name in ("device_index", "gpu_index") if name in known)
    return tuple(wrap(tuple(argv), **{index: local_rank}, numa_options=options))
