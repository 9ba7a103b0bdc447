"""Runs a training script with faults, and checks that it survives them."""

from __future__ import annotations

import contextlib
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_agent.testing.checks import Check, check_leftovers, check_notices, files_below, torn_files
from elastic_agent.testing.cluster import LEFT, ClusterError, LocalCluster
from elastic_agent.testing.faults import DEFAULT, FAULTS, Injected
from elastic_agent.testing.mistakes import Evidence, Mistake, find_mistakes
from elastic_agent.testing.workspace import Workspace

ENDING_S = 10.0
"""How long after the first agent the others may end."""
_NO_STEP = (
    "no training step was seen: the script makes no step of a torch optimizer; have it report its steps with "
    "client.heartbeat(step)"
)
FIRST_SAVE_S = 60.0
"""How long the first fault waits for the first checkpoint."""


@dataclass(frozen=True, kw_only=True)
class Options:
    """Options of :func:`run_chaos`."""

    nodes: int = 3
    min_nodes: int = 1
    """The number of nodes with which training continues while others are missing."""
    nproc_per_node: int = 1
    faults: Sequence[str] = DEFAULT
    """Names from ``FAULTS``, in order."""
    seed: int = 0
    """Decides which worker or node a fault hits."""
    every_s: float = 5.0
    """For how long all nodes train before a fault hits."""
    checkpoints: Path | None = None
    """The folder that the script saves to, relative to its working folder or absolute; must not contain anything."""
    shared: Sequence[Path] = ()
    """More folders that all machines share, when there are machines."""
    separate_folders: bool = False
    """Each node has its own working folder, as machines without a shared one."""
    hang_timeout_s: float = 10.0
    """After which time without progress workers count as hung; longer than the longest step."""
    timeout_s: float = 120.0
    """How long the script may take to make its next step, and to end after the last fault without a step."""
    folder: Path | None = None
    """For everything that is written; None: temporary, removed if the script passed."""
    agent_options: Sequence[str] = ()
    """More options of the agents."""


@dataclass(frozen=True)
class FaultResult:
    """One fault."""

    name: str
    what: str
    recovery_s: float | None
    """From the fault to the end of the next training step; None: there was none."""
    position: int = 0
    """How many steps training had made when the fault hit."""
    lost: int | None = None
    """How many steps had to be repeated; None: unknown."""

    def __str__(self) -> str:
        repeated = "" if self.lost is None else f", {self.lost} step{'s' * (self.lost != 1)} repeated"
        then = (
            "no further training step"
            if self.recovery_s is None
            else f"next training step after {self.recovery_s:.1f} s{repeated}"
        )
        return f"{self.name}: {self.what} at step {self.position}; {then}"


@dataclass
class Report:
    """The result of a run with faults. ``passed``: every check."""

    faults: list[FaultResult] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    mistakes: list[Mistake] = field(default_factory=list)
    folder: Path | None = None
    """With the output of the agents and workers, if it was kept."""

    @property
    def passed(self) -> bool:
        return all(check.passed for check in self.checks) and not self.mistakes

    def verdict(self) -> str:
        """Return the checks and mistakes."""
        lines = [str(check) for check in self.checks]
        lines += [f"mistake: {mistake}" for mistake in self.mistakes]
        lines.append("passed" if self.passed else "FAILED")
        if self.folder:
            lines.append(f"output of agents and workers: {self.folder}")
        return "\n".join(lines)

    def text(self) -> str:
        """Return the whole report."""
        return "\n".join([*map(str, self.faults), self.verdict()])


def run_chaos(
    script: Sequence[str], options: Options, show: Callable[[str], object] = lambda _: None
) -> Report:
    """Run a script with faults.

    Args:
        script: the script and its arguments (or ``-m``, module, arguments). ``{checkpoints}`` in an argument becomes a
            fresh folder that all nodes share.
        options: what is done to it.
        show: gets a line about each thing that happened.

    Raises:
        OSError: a folder cannot be made or written.
    """
    folder = (options.folder or Path(tempfile.mkdtemp(prefix="elastic-agent-chaos-"))).resolve()
    folder.mkdir(parents=True, exist_ok=True)
    report = Report(folder=folder)
    try:
        show(f"running the script with faults: {', '.join(options.faults)}")
        _ChaosRun(script, options, folder, report, show).run()
    except KeyboardInterrupt:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if options.folder is None and report.passed:
        shutil.rmtree(folder)
        report.folder = None
    return report


def _end(cluster: LocalCluster, timeout_s: float) -> dict[str, int]:
    """Return the exit codes of all nodes. Raises ClusterError when there is no step or end for this long."""
    while not cluster.is_over():
        made = len(cluster.records())

        def look(made: int = made) -> bool:
            return cluster.is_over() or len(cluster.records()) > made

        cluster.wait("a training step, or the end", look, timeout_s)
    # Nodes that are still about to join, when the run ends, wait for another one.
    with contextlib.suppress(ClusterError):
        cluster.wait("", lambda: not any(agent.runs for agent in cluster.agents.values()), ENDING_S)
    for agent in cluster.agents.values():
        if agent.runs:
            agent.terminate()
    codes = cluster.wait_end()
    return {name: code for name, code in codes.items() if code not in LEFT}


def _last_error(cluster: LocalCluster) -> str:
    """Return the last error in the log of a node that failed."""
    for agent in cluster.agents.values():
        if agent.process.returncode:
            lines = [line for line in agent.said().splitlines() if line.strip()]
            wrong = [line for line in lines if "error" in line.lower()] or lines
            return (
                f"{agent.name} ended with exit code {agent.process.returncode}: {wrong[-1] if wrong else ''}"
            )
    return ""


class _ChaosRun:
    """The run with faults."""

    def __init__(
        self,
        script: Sequence[str],
        options: Options,
        folder: Path,
        report: Report,
        show: Callable[[str], object],
    ) -> None:
        self._options = options
        self._report = report
        self._show = show
        self._rng = random.Random(options.seed)
        self._torn: list[str] = []
        self._examined = 0
        self._space = Workspace(folder, script, options.checkpoints, options.separate_folders)
        own = folder / "cluster"
        own.mkdir()
        self._cluster = LocalCluster(
            self._space.command(),
            own,
            nodes=options.nodes,
            min_nodes=options.min_nodes,
            max_nodes=options.nodes + sum(name == "join" for name in options.faults),
            nproc_per_node=options.nproc_per_node,
            hang_timeout_s=options.hang_timeout_s,
            options=tuple(options.agent_options),
            working_folder=self._space.working_folder,
        )

    def run(self) -> None:
        """Inject the faults, and check what came of them."""
        cluster, problem = self._cluster, ""
        codes: dict[str, int] = {}
        try:
            with cluster:
                try:
                    cluster.start_all()
                    self._inject_all()
                    codes = _end(cluster, self._options.timeout_s)
                except ClusterError as error:
                    problem = str(error).splitlines()[0]
                leftovers = check_leftovers(cluster) if cluster.is_over() else None
                self._judge(codes, problem, leftovers)
        finally:
            self._space.close()

    def _inject_all(self) -> None:
        cluster = self._cluster
        cluster.wait_training(*cluster.names, timeout_s=self._options.timeout_s)
        # A checkpoint, and a step after it:
        self._await(lambda: bool(cluster.course.saves) and cluster.course.position > 2, FIRST_SAVE_S)
        for number, name in enumerate(self._options.faults):
            self._await(lambda: False, self._options.every_s)
            if cluster.is_over():
                return
            result = self._inject(name)
            if result.recovery_s is None and cluster.has_finished():
                return  # the script had no step left to make
            self._report.faults.append(result)
            self._show(f"fault {number + 1}: {result}")
            if result.recovery_s is None:
                return

    def _await(self, look: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``look`` finds something, the time is over, or the run is."""
        cluster = self._cluster
        with contextlib.suppress(ClusterError):
            cluster.wait("", lambda: look() or cluster.is_over(), timeout_s)

    def _inject(self, name: str) -> FaultResult:
        cluster = self._cluster
        generation, position = cluster.generation, cluster.course.position
        injected = FAULTS[name].inject(cluster, self._rng)
        self._examine()
        alone = len(cluster.names) - (injected.without is not None) < self._options.min_nodes
        if alone and injected.repair:  # training does not continue before
            injected.repair()
        recovered_s = self._next_step(injected, generation)
        if recovered_s is None:
            return FaultResult(name, injected.what, None, position)
        later = cluster.course.newest
        lost = later.lost if later and later.number > generation else 0
        after = 0
        if injected.repair and not alone:
            after = later.number if later else 0
            injected.repair()
        cluster.wait_training(*cluster.names, after=after, timeout_s=self._options.timeout_s)
        return FaultResult(name, injected.what, recovered_s - injected.at_s, position, lost)

    def _next_step(self, injected: Injected, generation: int) -> float | None:
        """Return when the next training step was made after a fault; None if none was."""
        cluster = self._cluster

        def look() -> float | None:
            newest = cluster.course.newest
            if newest and newest.number > generation:
                return newest.first_step_s
            if injected.restarts:
                return None
            steps = cluster.records("step") or cluster.records("beat")
            return next((step["boottime_s"] for step in steps if step["boottime_s"] > injected.at_s), None)

        self._await(lambda: look() is not None, self._options.timeout_s)
        return look()

    def _examine(self) -> None:
        """Look at the checkpoints as they are just now."""
        generations = self._cluster.course.generations.values()
        loaded = {Path(path) for generation in generations for path in generation.loaded}
        paths = {*loaded, *files_below(self._space.checkpoint_folder)}
        self._examined += len(paths)
        self._torn += torn_files(paths)

    def _judge(self, codes: dict[str, int], problem: str, leftovers: Check | None) -> None:
        cluster, report = self._cluster, self._report
        seen = Evidence(
            cluster.records(),
            cluster.journal(),
            cluster.course,
            [*self._space.local, cluster.temp_folders],
            [*self._space.shared, *(path.resolve() for path in self._options.shared)],
            self._torn,
        )
        report.mistakes += find_mistakes(seen)
        done = len(report.faults)
        wanted = len(self._options.faults)
        recovered = sum(fault.recovery_s is not None for fault in report.faults)
        text = f"training continued after {recovered} of {done} faults"
        report.checks.append(
            Check(recovered == done and not problem, f"{text}; {problem}" if problem else text)
        )
        failed = any(code not in (0, -signal.SIGKILL) for code in codes.values())
        if codes:
            end = f"the run failed: {_last_error(cluster)}" if failed else "the script ran to its end"
            report.checks.append(Check(not failed, end))
        if codes and not failed and not cluster.course.position:
            report.checks.append(Check(False, _NO_STEP))
        elif done < wanted and not problem and not failed:
            early = f"the script ended before fault {done + 1} of {wanted}"
            report.checks.append(
                Check(False, f"{early}: have it train longer, or inject fewer or sooner (--every)")
            )
        loaded = {line["path"] for line in seen.loads()}
        torn = sorted(loaded.intersection(self._torn))
        report.checks.append(
            Check(
                not torn, f"torn checkpoints: {', '.join(torn) or 'none'} ({self._examined} files examined)"
            )
        )
        report.checks.append(check_notices(seen, is_explained=bool(report.mistakes)))
        if leftovers is not None:
            report.checks.append(leftovers)
