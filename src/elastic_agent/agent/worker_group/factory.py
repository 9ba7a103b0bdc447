"""One generation's workers, ready to be started: their environment, their files in memory and log files."""

from __future__ import annotations

import contextlib
import os
import signal
from collections.abc import Mapping
from importlib.metadata import entry_points
from string import Template
from typing import TYPE_CHECKING

from elastic_agent import worker_variables as variables
from elastic_agent.client._cells import HeartbeatFile
from elastic_agent.config.directories import default_log_dir
from elastic_agent.config.settings import Settings
from elastic_agent.config.sources.slurm import is_step
from elastic_agent.config.value_types import StreamChoice
from elastic_agent.logs import adopt_library_loggers
from elastic_agent.protocol import World
from elastic_agent.transport import interface_of
from elastic_agent.workers.context import BackgroundCloser, WorkerContext
from elastic_agent.workers.facts import Started
from elastic_agent.workers.guard.client import Guard
from elastic_agent.workers.output.folders import KEPT_RUNS, run_folder
from elastic_agent.workers.output.generation_logs import GenerationLogs, Streams
from elastic_agent.workers.spawner.curated import current_folder

from .command import RunFacts, worker_command, worker_environment
from .heartbeat_files import make_heartbeat_file
from .parking import Parked
from .warm_start import PATIENCE_SHARE, is_warm, keeps_workers

if TYPE_CHECKING:  # it is imported late, for the options that need it
    from torch.distributed.elastic.multiprocessing import LogsSpecs
    from torch.numa.binding import NumaOptions


_COPIES = 2
"""Of each worker's state: while it writes one, the other is complete."""


def line_prefixes(settings: Settings, envs: dict[int, dict[str, str]]) -> dict[int, str] | None:
    """Return what stands before each worker's lines on the console, from the user's template."""
    if settings.log_line_prefix_template is None:
        return None
    template = Template(settings.log_line_prefix_template)
    return {
        slot: template.safe_substitute(role_name=settings.role, rank=env["RANK"], local_rank=str(slot))
        for slot, env in envs.items()
    }


def logs_specs(settings: Settings, slots: int) -> GenerationLogs | LogsSpecs:
    """Return where the workers' output goes.

    Raises:
        ValueError: the log directory cannot be used, or there is no such ``torchrun.logs_specs`` entry point.
    """
    redirects, tee = _by_slot(settings.redirects, slots), _by_slot(settings.tee, slots)
    shown = set(settings.local_ranks_filter) or None
    if settings.logs_specs is not None:
        return _plugged_in(settings.logs_specs, str(settings.log_dir), redirects, tee, shown)
    # What the user gave a name, the user may look for.
    is_default = settings.log_dir == default_log_dir(settings.state_dir)
    named = settings.rdzv_id is not None or not is_default
    try:
        return GenerationLogs(
            str(settings.log_dir),
            redirects,
            tee,
            shown,
            keep_runs=None if named else KEPT_RUNS,
        )
    except ValueError as error:
        option = f"--state-dir {settings.state_dir}" if is_default else "--log-dir"
        raise ValueError(f"{option}: {error}; expected a writable directory") from error


def _plugged_in(
    name: str,
    log_dir: str,
    redirects: Mapping[int, Streams],
    tee: Mapping[int, Streams],
    shown: set[int] | None,
) -> LogsSpecs:
    """Return the user's own kind of logs, a subclass of torch's, with what torch would give it."""
    found = list(entry_points(group="torchrun.logs_specs", name=name))
    if not found:
        known = ", ".join(sorted(entry.name for entry in entry_points(group="torchrun.logs_specs"))) or "none"
        raise ValueError(
            f"--logs-specs {name}: no such entry point in torchrun.logs_specs; installed: {known}"
        )
    from torch.distributed.elastic.multiprocessing import Std

    kind: type[LogsSpecs] = found[0].load()
    adopt_library_loggers()
    return kind(
        log_dir,
        {slot: Std(streams) for slot, streams in redirects.items()},
        {slot: Std(streams) for slot, streams in tee.items()},
        shown,
    )


def _by_slot(choice: StreamChoice, slots: int) -> dict[int, Streams]:
    return {slot: Streams(choice.of(slot)) for slot in range(slots)}


def numa_options(binding: str | None) -> NumaOptions | None:
    """Return torch's form of ``--numa-binding``; imports torch if there is one: call it before a run is joined."""
    if binding is None:
        return None
    from torch.numa.binding import AffinityMode, NumaOptions

    adopt_library_loggers()
    return NumaOptions(AffinityMode(binding))


def signals_to_ignore(settings: Settings, environ: Mapping[str, str]) -> tuple[int, ...]:
    """Return the signals that must not end a worker which has no handler for them.

    Slurm sends the notice signal to every process of a step, not to the agents alone, where it finds them by their
    parents (proctrack/linuxproc). A worker that died of it could not save. SIGTERM is not among them: it is also what
    ends workers, and what they end their own children with.
    """
    signum = settings.notice_signum
    return (signum,) if is_step(environ) and signum not in (None, signal.SIGTERM) else ()


class StateMemory:
    """The memory in which workers keep their state over restarts: two files (memfd) for each worker of this node.

    They are empty until a worker uses :mod:`elastic_agent.survive`, end with this process, and are accounted to the
    cgroup of the workers that fill them.
    """

    def __init__(self, slots: int) -> None:
        """Make the files.

        Raises:
            OSError: this process may not have more open files.
        """
        self._files: list[list[int]] = []
        try:
            for _ in range(slots):
                self._files.append([])
                for _ in range(_COPIES):
                    self._files[-1].append(os.memfd_create("elastic-agent-state", os.MFD_CLOEXEC))
        except BaseException:
            self.close()
            raise

    @property
    def paths(self) -> list[str]:
        """For each slot, its files as its worker can open them, with a colon between."""
        folder = f"/proc/{os.getpid()}/fd"
        return [":".join(f"{folder}/{file}" for file in files) for files in self._files]

    def close(self) -> None:
        """Give the memory back. Repeatable; only when no worker runs."""
        for files in self._files:
            for file in files:
                with contextlib.suppress(OSError):
                    os.close(file)
        self._files = []


class WorkerFactory:
    """Makes the workers of this node, generation by generation."""

    def __init__(self, settings: Settings, slots: int) -> None:
        """Prepare for so many workers.

        Raises:
            OSError, ValueError: the log directory cannot be used, or there is no such kind of logs.
        """
        self._settings = settings
        self._logs = logs_specs(settings, slots)
        self._closer = BackgroundCloser()
        self._folder = current_folder() or ""
        """The working directory when the agent began; empty: not known."""
        self._numa_options = numa_options(settings.numa_binding)
        self._state_memory = StateMemory(slots)
        self.keeps_workers = keeps_workers(settings)
        """Workers keep their processes when the world changes."""

    def make(
        self,
        guard: Guard,
        world: World,
        incarnation: str,
        restarts: int,
        parked: Parked | None,
        number: int | None,
        *,
        run_id: str,
        asked_by: str | None,
    ) -> tuple[WorkerContext, HeartbeatFile]:
        """Return the workers of this node in ``world``, not started yet, and their heartbeat file.

        Args:
            guard: starts them.
            world: which this incarnation has a seat in.
            incarnation: of this node.
            restarts: those that were charged so far.
            parked: workers that are to go on; they have a heartbeat file.
            number: by which the guard knows workers that are started apart from any world; None: the generation.
            run_id: the run.
            asked_by: where workers introduce themselves to be asked for their progress; None: nowhere.

        Raises:
            OSError: the log files or the heartbeat file cannot be made.
        """
        seat = world.seat_of(incarnation)
        assert seat is not None  # only seated nodes start
        heartbeats = make_heartbeat_file(seat.slots) if parked is None else parked.heartbeats
        try:
            interface, memory = interface_of(seat.address), self._state_memory.paths
            parking = "" if not self.keeps_workers else variables.KEEP if number is None else variables.APART
            facts = RunFacts(run_id, restarts, heartbeats.path, interface, asked_by, memory, parking)
            envs = {
                slot: worker_environment(os.environ, self._settings, facts, world, seat, slot)
                for slot in range(seat.slots)
            }
            context = self._context(guard, world.generation if number is None else number, world, envs)
        except BaseException:
            if parked is None:
                heartbeats.close()
            raise
        if parked is not None:
            context.parked = parked.pids
            heartbeats.begin_anew(parked.pids.keys())
        return context, heartbeats

    def log_dir(self, run_id: str) -> str:
        """Return where the output of the run's workers is; empty: in no file of ours."""
        logs = self._logs
        if not isinstance(logs, GenerationLogs) or logs.root_log_dir == os.devnull:
            return ""
        return str(run_folder(logs.root_log_dir, run_id))

    def forget_states(self) -> None:
        """Give back the memory in which workers kept their state: none is started any more."""
        self._state_memory.close()

    def close(self, patience_s: float) -> None:
        """Wait until the last lines of output are written, not for longer than this."""
        self._closer.drain_closing(patience_s)
        if isinstance(self._logs, GenerationLogs):
            self._logs.close()

    def _context(
        self, guard: Guard, number: int, world: World, envs: dict[int, dict[str, str]]
    ) -> WorkerContext:
        settings = self._settings
        commands = {slot: worker_command(settings, slot) for slot in envs}
        return WorkerContext(
            guard,
            number,
            settings.role,
            commands[0][0],
            {slot: command[1:] for slot, command in commands.items()},
            envs,
            self._logs,
            self._closer,
            log_line_prefixes=line_prefixes(settings, envs),
            duplicate_stdout_filters=settings.duplicate_stdout_filters,
            duplicate_stderr_filters=settings.duplicate_stderr_filters,
            numa_options=self._numa_options,
            warm=is_warm(settings),
            warm_patience_s=settings.start_timeout * PATIENCE_SHARE,
            ignored_signals=signals_to_ignore(settings, os.environ),
            startup_hook=not settings.runs_program,
            started=Started(
                self._folder,
                "" if settings.runs_program else commands[0][0],
                len({seat.address for seat in world.seats}) - 1,
            ),
            kept_bytes=settings.log_limit,
        )
