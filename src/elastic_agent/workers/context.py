"""The workers of one generation as a torch process context, on a guard instead of `subprocess`.

torch's redirects, tee, filters and error files work as usual. The difference: nothing here waits. The guard's
events are passed in (`handle`), `_poll` evaluates them, the guard stops the workers, and the part of `close` that
waits for torch's log threads can be left to a `BackgroundCloser`.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING

from torch.distributed.elastic.multiprocessing import LogsSpecs, PContext, ProcessFailure, RunProcsResult

from elastic_agent.workers import facts, failure, torch_adapter
from elastic_agent.workers.guard.client import (
    Exited,
    Guard,
    GuardEvent,
    GuardLost,
    Launch,
    Spawned,
    SpawnFailed,
    Stopped,
)
from elastic_agent.workers.output.final_output import FinalOutput, read_final_output

if TYPE_CHECKING:
    from torch.numa.binding import NumaOptions

_COULD_NOT_START = 127  # the exit codes of shells for a command that they cannot run


class BackgroundCloser:
    """Closes contexts in threads of their own: torch's log threads need up to 0.2 s to end."""

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []

    def submit(self, close: Callable[[], None]) -> None:
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        thread = threading.Thread(target=close, name="close-workers", daemon=True)
        thread.start()
        self._threads.append(thread)

    def drain_closing(self, timeout_s: float) -> bool:
        """Wait until all are closed, so that no output is lost; False when `timeout_s` did not do."""
        ends = time.monotonic() + timeout_s
        for thread in self._threads:
            thread.join(max(0.0, ends - time.monotonic()))
        self._threads = [thread for thread in self._threads if thread.is_alive()]
        return not self._threads


class WorkerContext(PContext):
    """One generation's workers.

    Args:
        guard: Starts the processes; its deadline must be set.
        generation: The generation's number, by which events are matched.
        name: Header of shown lines, as in "[name0]:", without `log_line_prefixes`.
        entrypoint: Program to run; `args` are its arguments by local rank.
        envs: Variables by local rank, on top of this process's own.
        logs_specs: Makes the log files; adds to `envs`.
        closer: Runs `close_later`.
        warm: Fork them from the guard's spawner, if it has one; not together with `numa_options`.
        warm_patience_s: How long they wait for a spawner that still imports.
        ignored_signals: Which signals they begin with ignored.
        startup_hook: Whether cold workers adapt frameworks, too (`workers.cold_start`).
    """

    def __init__(
        self,
        guard: Guard,
        generation: int,
        name: str,
        entrypoint: str,
        args: Mapping[int, tuple[object, ...]],
        envs: Mapping[int, dict[str, str]],
        logs_specs: LogsSpecs,
        closer: BackgroundCloser,
        *,
        log_line_prefixes: dict[int, str] | None = None,
        duplicate_stdout_filters: list[str] | None = None,
        duplicate_stderr_filters: list[str] | None = None,
        numa_options: NumaOptions | None = None,
        warm: bool = False,
        warm_patience_s: float = 10.0,
        ignored_signals: tuple[int, ...] = (),
        startup_hook: bool = False,
    ) -> None:
        super().__init__(
            name,
            entrypoint,
            dict(args),
            dict(envs),
            logs_specs,
            log_line_prefixes,
            duplicate_stdout_filters,
            duplicate_stderr_filters,
        )
        self.generation = generation
        self._program = entrypoint
        self._guard = guard
        self._closer = closer
        self._numa_options = numa_options
        self._warm = warm
        self._warm_patience_s = warm_patience_s
        self.ignored_signals = ignored_signals
        self._startup_hook = startup_hook
        self._before: facts.Baseline | None = None
        self._started = False
        self._stopped = False
        self._lost: GuardLost | None = None
        self._spawn_failed: SpawnFailed | None = None
        self._spawned_pids: dict[int, int] = {}
        self._exits: dict[int, Exited] = {}
        self._failed: list[int] = []
        self._result: RunProcsResult | None = None

    # --- what is known ----------------------------------------------------------------------------

    @property
    def exits(self) -> Mapping[int, Exited]:
        """How workers ended, by local rank."""
        return self._exits

    @property
    def stopped(self) -> bool:
        """Whether no process of this generation is left, or none was ever started."""
        return self._stopped or not self._started

    def shows_stderr(self, slot: int) -> bool:
        """Whether this worker writes to the agent's own standard error."""
        return not self.stderrs[slot]

    @property
    def failures(self) -> list[failure.WorkerFailure]:
        """Workers that failed by themselves, the first one first; not those that a stop ended. Reads their files."""
        return [self.failure(self._exits[slot], self.final_output(slot)) for slot in self._failed]

    def final_output(self, slot: int) -> FinalOutput:
        """What is known of the end of a worker: its files, and memory. May block as long as a file system hangs."""
        streams = {"stdout": self.stdouts[slot], "stderr": self.stderrs[slot]}
        files = {name: path for name, path in streams.items() if path not in ("", os.devnull)}
        memory = facts.memory_facts(self._before) if self._before is not None else {}
        return dataclasses.replace(read_final_output(self.error_files[slot], files), facts=memory)

    def machine_facts(self) -> dict[str, str]:
        """Facts about the machine, compared with when the workers were started. Takes at most about a second."""
        if self._before is None:
            return {}
        killed = [one.pid for one in self._exits.values() if one.returncode < 0]
        folders = {os.path.dirname(path) for path in self.error_files.values()}
        return facts.machine_facts(self._before, killed, [os.getcwd(), *sorted(folders)])

    def failure(self, event: Exited, words: FinalOutput, noted: str = "") -> failure.WorkerFailure:
        """How a worker failed, by its exit, by the content of its files, and by the error that it noted itself."""
        return failure.describe(
            event.slot,
            event.returncode,
            words.error_file,
            words.stderr or event.stderr_tail,
            words.no_room,
            words.facts,
            noted,
        )

    def pids(self) -> dict[int, int]:
        """Process ids by local rank; empty until all are started."""
        return dict(self._spawned_pids)

    # --- torch's extension points -----------------------------------------------------------------

    def start(self) -> None:
        """Have the guard start the workers. Installs no signal handlers, unlike torch's contexts.

        Raises RuntimeError when the guard's last generation is not stopped yet.
        """
        torch_adapter.start_context(self)

    def _start(self) -> None:
        if self._started:
            raise RuntimeError(f"the workers of generation {self.generation} have already been started")
        launches = [self._launch(slot) for slot in range(self.nprocs)]
        self._before = facts.baseline()
        self._guard.spawn(self.generation, launches, self._warm_patience_s)
        self._started = True

    def _launch(self, slot: int) -> Launch:
        argv = (self._program, *(str(argument) for argument in self.args[slot]))
        return Launch(
            slot=slot,
            argv=torch_adapter.with_numa_binding(argv, slot, self._numa_options),
            env={**os.environ, **{name: str(value) for name, value in self.envs[slot].items()}},
            stdout=self.stdouts[slot] or None,
            stderr=self.stderrs[slot] or None,
            warm=self._warm,
            ignored=self.ignored_signals,
            startup_hook=self._startup_hook,
        )

    def _poll(self) -> RunProcsResult | None:
        """None while all run; the result once all succeeded or one failed. Unlike torch's it stops no worker."""
        if self._result is None:
            self._result = self._conclude()
        return self._result

    def _close(self, death_sig: signal.Signals, timeout: int = 30) -> None:
        """Have what runs stopped; its end comes as an event."""
        if not self.stopped:
            self._guard.stop(0.0 if death_sig == signal.SIGKILL else float(timeout), death_sig)

    def close_later(self) -> None:
        """`close` in the background. Raises RuntimeError when processes of the generation are still there."""
        if not self.stopped:
            raise RuntimeError(f"generation {self.generation} must be stopped before its logs are closed")
        self._closer.submit(self.close)

    # --- events -----------------------------------------------------------------------------------

    def handle(self, event: GuardEvent) -> None:
        """Take note of an event; those of other generations are ignored."""
        if isinstance(event, GuardLost):
            self._lost = event
            self._stopped = True
        elif getattr(event, "generation", None) != self.generation:
            return
        elif isinstance(event, Spawned):
            self._spawned_pids = event.pids
        elif isinstance(event, SpawnFailed):
            self._spawn_failed = event
        elif isinstance(event, Exited):
            self._exits[event.slot] = event
            if event.returncode != 0 and not event.stopping:
                self._failed.append(event.slot)
        elif isinstance(event, Stopped):
            self._stopped = True

    # --- torch's result ---------------------------------------------------------------------------

    def _conclude(self) -> RunProcsResult | None:
        failures = {
            slot: self._process_failure(slot, self._exits[slot].pid, self._exits[slot].returncode)
            for slot in self._failed
        }
        if self._spawn_failed is not None:
            slot = max(0, self._spawn_failed.slot)
            failures[slot] = self._process_failure(slot, 0, _COULD_NOT_START, self._spawn_failed.error)
        elif self._lost is not None or (self._stopped and len(self._exits) < self.nprocs):
            for slot in set(range(self.nprocs)) - set(self._exits):
                failures[slot] = self._process_failure(slot, self._spawned_pids.get(slot, 0), -signal.SIGKILL)
        if not failures and len(self._exits) < self.nprocs:
            return None
        for slot, event in self._exits.items():
            if event.returncode != 0 and slot not in failures:  # ended by a stop, which is no success either
                failures[slot] = self._process_failure(slot, event.pid, event.returncode)
        return RunProcsResult(
            return_values={} if failures else dict.fromkeys(range(self.nprocs)),
            failures=failures,
            stdouts=self.stdouts,
            stderrs=self.stderrs,
        )

    def _process_failure(self, slot: int, pid: int, exitcode: int, message: str = "") -> ProcessFailure:
        error_file = self.error_files[slot]
        try:
            result = ProcessFailure(slot, pid, exitcode, error_file if os.path.isfile(error_file) else "")
        except Exception:  # the worker wrote something there that torch does not expect
            result = ProcessFailure(slot, pid, exitcode, "")
        if message:
            result.message = message
        elif slot in self._failed and (
            reported := self.failure(self._exits[slot], self.final_output(slot)).words
        ):
            result.message = reported
        # torch finds the first failure by whole seconds, of which the error file's are the worker's own;
        # the order of the deaths, in which these are made, decides among equal ones.
        result.timestamp = int(time.time())
        return result
