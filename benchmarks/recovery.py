"""From a fault to the first collective of every rank of the new world, by kind of fault.

elastic-agent at its defaults (lease 5 s, margin 1 s, settle 1 s) and with workers that are started cold, torchrun
tuned and (in a full run, once) at its defaults, ft_launcher where its command is installed. Workers are killed several
times in one scene; every other fault has scenes of its own (a quick run: beside torchrun only where that takes
seconds). Of three nodes, the one that hosts the store is lost for good: also with three hosts named, and with an etcd.
"""

from __future__ import annotations

from .faults import (
    NODE_JOINS,
    ONCE_EACH,
    SETTLE_S,
    STORE_LOST,
    WORKER_KILLED,
    Fault,
    Recovery,
    measure,
    measure_kills,
)
from .figures import Figure, Figures, Options, Ratio, Result, progress, ratio
from .launchers import OURS, OURS_COLD, OURS_ETCD, OURS_THREE, TORCHRUN, TORCHRUN_TUNED, Launcher, ft_launcher
from .stages import RECOVERY_STAGES, Stages, median_stages

KILLS, KILLS_OF_SLOW = 5, 3
QUICK_SCENES = 2
"""Of worker kills, which are cheap: the median of a quick run is one of ten."""
FASTER_AT_LEAST = 30.0
JOIN_MARGIN_S = 0.1
INTERRUPTION_TARGET_S = 0.1
IMPORT = "import torch beside the training"


class Book:
    """What was measured so far."""

    def __init__(self) -> None:
        self.figures = Figures()
        self.stages: dict[str, list[Stages]] = {}

    def figure(self, fault: Fault, launcher: Launcher) -> Figure:
        return self.figures.of(fault.name, launcher.name, target=fault.target_s if launcher is OURS else None)

    def enter(self, fault: Fault, launcher: Launcher, outcome: Recovery | str) -> None:
        figure = self.figure(fault, launcher)
        if isinstance(outcome, str):
            figure.add(outcome)
            progress(f"{fault.name}, {launcher.name}: {outcome}")
            return
        figure.add(outcome.took_s)
        progress(f"{fault.name}, {launcher.name}: {outcome.took_s:.3f} s")
        if outcome.stages:
            self.stages.setdefault(f"{fault.name}, {launcher.name}", []).append(outcome.stages)
        if fault.is_join:
            target = INTERRUPTION_TARGET_S if launcher is OURS else None
            interruption = self.figures.of(
                f"{fault.name}: survivors' interruption", launcher.name, target=target
            )
            interruption.add(outcome.interruption_s)
        if outcome.import_torch_s is not None:
            self.figures.of(IMPORT, "python").add(outcome.import_torch_s)

    def result(self) -> Result:
        imported = self.figures.of(IMPORT, "python")
        if imported.median is not None:
            self.figure(NODE_JOINS, OURS).target = imported.median + SETTLE_S + JOIN_MARGIN_S
        medians = {name: median_stages(RECOVERY_STAGES, samples) for name, samples in self.stages.items()}
        note = f"A node that joins may take its import of torch, {SETTLE_S:g} s to settle and {JOIN_MARGIN_S:g} s."
        tables = {"recovery_stages": medians, "all_stages": self.stages}
        return Result("recovery", list(self.figures), [note], self._ratios(), tables)

    def _ratios(self) -> list[Ratio]:
        found = []
        for fault in (WORKER_KILLED, *ONCE_EACH):
            target = FASTER_AT_LEAST if fault is WORKER_KILLED else None
            found += ratio(self.figure(fault, OURS), self.figure(fault, TORCHRUN_TUNED), target)
        return found


def run(options: Options) -> Result:
    book = Book()
    theirs = ft_launcher()
    slow = [OURS_COLD, TORCHRUN_TUNED, *([theirs] if theirs is not None else [])]
    for _ in range(QUICK_SCENES if options.quick else options.runs):
        _kill_workers(book, OURS, KILLS)
        for launcher in slow:
            _kill_workers(book, launcher, KILLS_OF_SLOW)
    for number in range(options.times):
        for fault in ONCE_EACH:
            beside = [TORCHRUN_TUNED] if fault is NODE_JOINS or not options.quick else []
            for launcher in (OURS, *beside):
                known = book.figure(fault, launcher)
                if number >= 2 and launcher is not OURS and len(known.misses) >= 2:
                    continue  # it does not recover; another minute of waiting would tell nothing new
                book.enter(fault, launcher, measure(launcher, fault))
        for launcher in (OURS_THREE, *(() if options.quick else (OURS_ETCD, TORCHRUN_TUNED))):
            if len(book.figure(STORE_LOST, launcher).misses) < 2:
                book.enter(STORE_LOST, launcher, measure(launcher, STORE_LOST))
    if not options.quick:
        for launcher in (TORCHRUN, *([theirs] if theirs is not None else [])):
            _once(book, launcher)
    return book.result()


def _kill_workers(book: Book, launcher: Launcher, times: int) -> None:
    if len(book.figure(WORKER_KILLED, launcher).misses) >= 2:
        return
    for outcome in measure_kills(launcher, times):
        book.enter(WORKER_KILLED, launcher, outcome)


def _once(book: Book, launcher: Launcher) -> None:
    """Each fault once: mostly a minute of waiting in vain."""
    for fault in (WORKER_KILLED, *ONCE_EACH):
        known = book.figure(fault, launcher)
        if not known.samples and not known.misses:
            book.enter(fault, launcher, measure(launcher, fault))
