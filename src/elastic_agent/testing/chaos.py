"""Runs a training script with faults, and checks that it survives them."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from elastic_agent.exit_codes import ExitCode
from elastic_agent.testing.cluster import LEFT, ClusterError, LocalCluster
from elastic_agent.testing.faults import DEFAULT, FAULTS, Injected
from elastic_agent.testing.mistakes import (
    Check,
    Evidence,
    Mistake,
    check_leftovers,
    find_mistakes,
    is_torn,
)

PLACEHOLDER = "{checkpoints}"
"""In the arguments of a script: the folder for checkpoints."""
ENDING_S = 10.0
"""The others may end so long after the first agent."""
FIRST_SAVE_S = 60.0
"""The longest wait of the first fault for the first checkpoint."""
WITH_NOTICE = ("drain", "stop")
"""The faults of which the workers get a notice, in which they can save every step."""
_HEED_NOTICES = (
    "check for notices after each step (client.Agreement().notice()), then save and call client.leave(); see "
    "docs/script.md, Notices"
)
_NO_STEP = (
    "no training step was seen: the script makes no step of a torch optimizer; have it report its steps with "
    "client.heartbeat(step)"
)


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
    every: float = 5.0
    """For how many seconds all nodes train before a fault hits."""
    checkpoints: str | None = None
    """The folder below the working folder that the script saves to."""
    separate_folders: bool = False
    """Each node has its own working folder, as machines without a shared one."""
    hang_timeout: float = 10.0
    """After which time without progress, in seconds, workers count as hung; longer than the longest step."""
    timeout: float = 120.0
    """Seconds that the script may take to make its next step, and to end after the last fault without a step."""
    folder: str | None = None
    """For everything that is written; None: temporary, removed if the script passed."""
    preload: str | None = None
    """The agents' ``--preload``."""


@dataclass(frozen=True)
class FaultResult:
    """One fault."""

    name: str
    what: str
    recovery_s: float | None
    """From the fault to the end of the next training step; None: there was none."""
    position: int = 0
    """The number of steps that training had made when the fault hit."""
    lost: int | None = None
    """The number of steps that had to be repeated; None: unknown."""

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
        return all(check.passed is not False for check in self.checks) and not self.mistakes

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
    folder = Path(options.folder or tempfile.mkdtemp(prefix="elastic-agent-chaos-")).resolve()
    for part in ("checkpoints", "cluster"):
        (folder / part).mkdir(parents=True)
    try:
        show(f"running the script with faults: {', '.join(options.faults)}")
        report = _ChaosRun(script, options, folder, show).run()
    except KeyboardInterrupt:
        if options.folder is None:
            shutil.rmtree(folder, ignore_errors=True)
        raise
    if options.folder is None and report.passed:
        shutil.rmtree(folder)
        report.folder = None
    return report


def _make_working_folder(work: Path, ours: Path, checkpoints: str | None) -> None:
    """Make copies of the files of the current folder and links to the folders in it.

    Args:
        work: the new folder.
        ours: a folder that may be in the current one, and gets no link.
        checkpoints: a folder that is replaced by the new one for checkpoints.
    """
    work.mkdir(parents=True)
    for entry in os.scandir():
        source, target = Path(entry.path).absolute(), work / entry.name
        if ours.is_relative_to(source) or (checkpoints and Path(checkpoints).parts[0] == entry.name):
            continue
        if entry.is_dir():
            target.symlink_to(source)
        elif entry.is_file():
            shutil.copy2(source, target)
    if checkpoints:
        (work / checkpoints).parent.mkdir(parents=True, exist_ok=True)
        (work / checkpoints).symlink_to(ours / "checkpoints")


class _ChaosRun:
    """The run with faults. Its folder has those for checkpoints, the cluster, and the working folders (``work``)."""

    def __init__(
        self, script: Sequence[str], options: Options, folder: Path, show: Callable[[str], object]
    ) -> None:
        self._options = options
        self._folder = folder
        self._checkpoints = folder / "checkpoints"
        self._show = show
        self._report = Report(folder=folder)
        self._rng = random.Random(options.seed)
        self._torn: list[str] = []
        self._examined = 0
        command = [word.replace(PLACEHOLDER, str(self._checkpoints)) for word in script]
        if command[0] != "-m":
            command[0] = os.path.abspath(command[0])
        self._cluster = LocalCluster(
            command,
            folder / "cluster",
            nodes=options.nodes,
            min_nodes=options.min_nodes,
            max_nodes=options.nodes + sum(name == "join" for name in options.faults),
            nproc_per_node=options.nproc_per_node,
            hang_timeout_s=options.hang_timeout,
            options=("--preload", options.preload) if options.preload else (),
            working_folder=self._working_folder,
        )

    def _working_folder(self, node: str) -> Path:
        work = self._folder / "work" / (node if self._options.separate_folders else "all")
        if not work.exists():
            _make_working_folder(work, self._folder, self._options.checkpoints)
        return work

    def run(self) -> Report:
        """Inject the faults, and check what came of them."""
        cluster, problem = self._cluster, ""
        codes: dict[str, int] = {}
        with cluster:
            try:
                cluster.start_all()
                self._inject_all()
                codes = self._end()
            except ClusterError as error:
                problem = str(error).splitlines()[0]
            leftovers = [check_leftovers(cluster)] if cluster.is_over() else []
            self._judge(codes, problem)
            self._report.checks += leftovers
        return self._report

    def _inject_all(self) -> None:
        cluster = self._cluster
        cluster.wait_training(*cluster.names, timeout_s=self._options.timeout)
        # A checkpoint, and a step after it:
        self._await(lambda: bool(cluster.course.saves) and cluster.course.position > 2, FIRST_SAVE_S)
        for number, name in enumerate(self._options.faults, 1):
            self._await(lambda: False, self._options.every)
            if cluster.is_over():
                return
            result = self._inject(name)
            if result.recovery_s is None and ExitCode.FINISHED in self._codes():
                return  # the script had no step left to make
            self._report.faults.append(result)
            self._show(f"fault {number}: {result}")
            if result.recovery_s is None:
                return

    def _codes(self) -> list[int | None]:
        return [agent.process.poll() for agent in self._cluster.agents.values()]

    def _await(self, look: Callable[[], bool], timeout_s: float) -> None:
        """Wait until ``look`` is true, the time is over, or the run is."""
        with contextlib.suppress(ClusterError):
            self._cluster.wait("", lambda: look() or self._cluster.is_over(), timeout_s)

    def _inject(self, name: str) -> FaultResult:
        cluster, limit_s = self._cluster, self._options.timeout
        generation, position = cluster.generation, cluster.course.position
        injected = FAULTS[name].inject(cluster, self._rng)
        self._examine()
        repair = injected.repair or (lambda: None)
        is_alone = len(cluster.names) - (injected.without is not None) < self._options.min_nodes
        if is_alone:  # training does not continue before
            repair()
        self._await(lambda: self._next_step_s(injected, generation) is not None, limit_s)
        step_s = self._next_step_s(injected, generation)
        if step_s is None:
            return FaultResult(name, injected.what, None, position)
        later = cluster.course.newest
        lost = later.lost if later and later.number > generation else 0
        after = 0
        if injected.repair and not is_alone:
            after = later.number if later else 0
            repair()
        cluster.wait_training(*cluster.names, after=after, timeout_s=limit_s)
        return FaultResult(name, injected.what, step_s - injected.at_s, position, lost)

    def _next_step_s(self, injected: Injected, generation: int) -> float | None:
        """Return when the next training step was made after a fault; None if none was."""
        newest = self._cluster.course.newest
        if newest and newest.number > generation:
            return newest.first_step_s
        if injected.restarts:
            return None
        steps = self._cluster.records("step") or self._cluster.records("beat")
        return next((step["boottime_s"] for step in steps if step["boottime_s"] > injected.at_s), None)

    def _examine(self) -> None:
        """Look at the checkpoints as they are just now."""
        generations = self._cluster.course.generations.values()
        loaded = {Path(path) for generation in generations for path in generation.loaded}
        paths = loaded | {path for path in self._checkpoints.rglob("*") if path.is_file()}
        self._examined += len(paths)
        self._torn += [str(path) for path in paths if is_torn(path)]

    def _end(self) -> dict[str, int]:
        """Return the exit codes of the nodes that did not leave. Raises ClusterError: no step or end for this long."""
        cluster = self._cluster
        while not cluster.is_over():
            made = len(cluster.records())

            def look(made: int = made) -> bool:
                return cluster.is_over() or len(cluster.records()) > made

            cluster.wait("a training step, or the end", look, self._options.timeout)
        # Nodes that are still about to join, when the run ends, wait for another one.
        with contextlib.suppress(ClusterError):
            cluster.wait("", lambda: None not in self._codes(), ENDING_S)
        for agent in cluster.agents.values():
            if agent.runs:
                agent.signal(signal.SIGTERM)
        return {name: code for name, code in cluster.wait_end().items() if code not in LEFT}

    def _judge(self, codes: dict[str, int], problem: str) -> None:
        report, course = self._report, self._cluster.course
        work, checks = self._folder / "work", report.checks
        is_shared = not self._options.separate_folders
        seen = Evidence(
            self._cluster.records(),
            course,
            [self._folder / "cluster" / "machines", *([] if is_shared else [work])],
            [self._checkpoints, *([work] if is_shared else [])],
            self._torn,
        )
        report.mistakes += find_mistakes(seen)
        done, wanted = len(report.faults), len(self._options.faults)
        recovered = sum(fault.recovery_s is not None for fault in report.faults)
        text = f"training continued after {recovered} of {done} faults"
        checks.append(Check(recovered == done and not problem, f"{text}; {problem}" if problem else text))
        failed = any(code not in (0, -signal.SIGKILL) for code in codes.values())
        if codes:
            end = f"the run failed: {self._last_error()}" if failed else "the script ran to its end"
            checks.append(Check(not failed, end))
        if codes and not failed and not course.position:
            checks.append(Check(False, _NO_STEP))
        elif done < wanted and not problem and not failed:
            early = f"the script ended before fault {done + 1} of {wanted}"
            remedy = "have it train longer, or inject fewer or sooner (--every)"
            checks.append(Check(False, f"{early}: {remedy}"))
        torn = sorted({line["path"] for line in seen.loads()}.intersection(self._torn))
        listed = f"torn checkpoints: {', '.join(torn) or 'none'} ({self._examined} files examined)"
        missing = f"checkpoints: none were found; pass {PLACEHOLDER} to the script, or its folder with --checkpoints"
        checks.append(Check(not torn, listed) if self._examined else Check(None, missing))
        checks.append(self._check_notices())

    def _check_notices(self) -> Check:
        """Check that no steps were repeated after faults of which the workers get a notice."""
        recovered = [fault for fault in self._report.faults if fault.recovery_s is not None]
        faults = [fault for fault in recovered if fault.name in WITH_NOTICE]
        lost = ", ".join(
            f"{fault.lost} after {fault.name} at step {fault.position}" for fault in faults if fault.lost
        )
        if faults and all(fault.lost is None for fault in faults):
            return Check(None, f"steps lost after {len(faults)} notices: not known")
        text = f"steps lost after {len(faults)} notices: {lost or 'none'}"
        return Check(not lost, f"{text}; {_HEED_NOTICES}" if lost and not self._report.mistakes else text)

    def _last_error(self) -> str:
        """Return the last error in the log of a node that failed."""
        for agent in self._cluster.agents.values():
            if code := agent.process.returncode:
                lines = [line for line in agent.said().splitlines() if line.strip()]
                errors = [line for line in lines if "error" in line.lower()] or lines
                return f"{agent.name} ended with exit code {code}: {errors[-1] if errors else ''}"
        return ""
