"""The rules of the restart budget, held against the truth: what is charged, forgiven, paused for, and given up.

Nothing is forgiven too soon, and no run given up for a failure that did not repeat, whatever goes wrong. That progress
is counted, and a repetition noticed, directed scenarios show.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from elastic_agent.protocol.budget import LONGEST_PAUSE_S
from elastic_agent.protocol.cluster_view import PROGRESS_S
from elastic_agent.protocol.records import Phase, Plan, Policy

if TYPE_CHECKING:
    from .checker import Checker
    from .cluster import Cluster

EPSILON_S = 1e-6
RULE = "safety 5 (budget)"


class BudgetRules:
    """What every plan says of the budget, and what really happened."""

    def __init__(self, cluster: Cluster, checker: Checker) -> None:
        self.cluster = cluster
        self.checker = checker
        self._progress_at_seal: dict[int, float] = {}
        """Generation → the progress in the plan that sealed it."""
        self._sealed: list[tuple[int, bool]] = []
        """Generations in order, and whether a failure was charged when each was sealed."""
        self._forming_since_s: dict[int, float] = {}
        """Generation → when it was first published that it forms."""
        self._intended: dict[int, set[int]] = {0: {0}}
        """Charged failures → how many of them coordinators took for forgiven."""
        self._most_progress: dict[int, float] = {}
        """Charged failures → the most progress that coordinators counted."""

    def _require(self, true: bool, what: str) -> None:
        self.checker.require(true, RULE, what)

    def begin_again(self) -> None:
        """Another run, under the same name: with the whole budget."""
        self._intended, self._most_progress = {0: {0}}, {}
        self._sealed.clear()

    def intends(self, plan: Plan) -> None:
        """A coordinator is about to publish this."""
        if plan.version == 1:
            return  # the first of a store is to be compared with what was known before
        self._intended.setdefault(plan.charged, set()).add(plan.budget.forgiven)
        known_s = self._most_progress.get(plan.charged, 0.0)
        self._most_progress[plan.charged] = max(known_s, plan.budget.progress_s)

    def first_of_store(self, plan: Plan) -> None:
        """A new store knows what a machine remembered."""
        self._require(
            plan.budget.forgiven in self._intended.get(plan.charged, ()), f"a new store: {plan.budget}"
        )
        most_s = self._most_progress.get(plan.charged, 0.0)
        self._require(plan.budget.progress_s <= most_s + EPSILON_S, f"a new store: {plan.budget}")

    # -- from plan to plan ----------------------------------------------------------------------

    def published(self, before: Plan, plan: Plan) -> None:
        """A plan was written over another."""
        charges = plan.charged > before.charged
        forgiven = plan.budget.forgiven - before.budget.forgiven
        if not self._is_told(before, plan):
            due = _forgiven(before) if charges else 0
            self._require(forgiven == due, f"{forgiven} forgiven, {due} due, by {before.budget}")
            self._in_a_row(before, plan, charges=charges)
        if before.phase is Phase.RUNNING and plan.generation <= before.generation + 1:
            self._counted(before, plan)
        if plan.phase is Phase.FORMING:
            self._forming_since_s.setdefault(plan.generation, self.cluster.kernel.now)
        elif plan.phase is Phase.RUNNING and before.phase is Phase.FORMING:
            if charges:
                self._paused(before, plan)
            self.sealed(plan, charged=charges)

    def sealed(self, plan: Plan, *, charged: bool) -> None:
        """A world was sealed, or one that runs was found by a new store."""
        self._progress_at_seal[plan.generation] = plan.budget.progress_s
        if not self._sealed or self._sealed[-1][0] != plan.generation:
            self._sealed.append((plan.generation, charged))

    def _is_told(self, before: Plan, plan: Plan) -> bool:
        """Return whether this plan goes by what a node reported of a later generation, or of a sealed one."""
        is_above = before.phase is plan.phase is Phase.FORMING and plan.generation > before.generation
        return (is_above and plan.charged > before.charged) or plan.generation > before.generation + 1

    def _in_a_row(self, before: Plan, plan: Plan, *, charges: bool) -> None:
        was, now = before.budget.in_a_row, plan.budget.in_a_row
        if charges:
            self._require(now == was + 1, f"{now} failures in a row after {was}")
        elif now != was:
            self._require(now == 0 and before.phase is Phase.RUNNING, f"{now} failures in a row after {was}")
            beaten = plan.failure is not None and plan.failure.progressed
            self._require(
                beaten or self._may_be_progress(before), f"a crash loop ended without progress: {plan.budget}"
            )

    # -- progress -------------------------------------------------------------------------------

    def _ran_s(self, generation: int) -> float:
        """Return for how long the whole world was there until now, at most, by what its nodes reported.

        A node whose failure the coordinator has not read yet counts as running, even if another one started later.
        """
        truth = self.cluster.job.of(generation)
        began_s = truth.began_s
        if began_s is None and truth.complete:
            began_s = max(group.born_s for group in truth.groups.values())
        return self.cluster.kernel.now - began_s if began_s is not None else 0.0

    def _may_be_progress(self, before: Plan) -> bool:
        fast = 1.0 + 2.0 * self.cluster.scenario.max_skew
        return self._ran_s(before.generation) * fast + EPSILON_S >= least_s(before.policy)

    def _counted(self, before: Plan, plan: Plan) -> None:
        """No more progress than there was, and where nothing keeps it from being counted, not much less."""
        fast = 1.0 + 2.0 * self.cluster.scenario.max_skew
        known_s = self._progress_at_seal.get(before.generation, 0.0)
        ran_s = self._ran_s(before.generation)
        counted_s = plan.budget.progress_s
        self._require(
            counted_s <= known_s + ran_s * fast + EPSILON_S,
            f"{counted_s:.3f} s of progress counted, {known_s:.3f} s before, and {ran_s:.3f} s since",
        )
        most_s = (plan.charged - plan.budget.forgiven) * plan.policy.restart_window_s
        self._require(counted_s <= most_s, f"{counted_s:.3f} s counted, with which nothing is to be forgiven")
        if counted_s > known_s:
            beaten = plan.failure is not None and plan.failure.progressed
            self._require(
                beaten or self._may_be_progress(before), f"{counted_s:.3f} s counted without progress"
            )

    # -- pauses, and giving up ------------------------------------------------------------------

    def _paused(self, before: Plan, plan: Plan) -> None:
        row, notice = before.budget.in_a_row, before.notice
        if row == 0 or notice is not None:
            return
        slow = 1.0 - 2.0 * self.cluster.scenario.max_skew
        due_s = min(2.0 ** (row - 1), LONGEST_PAUSE_S) * slow
        took_s = self.cluster.kernel.now - self._forming_since_s[plan.generation]
        self.checker.require(
            took_s + EPSILON_S >= due_s,
            "a crash loop slows down",
            f"sealed after {took_s:.3f} s, {due_s:.3f} s due",
        )

    def pause_s(self, plan: Plan | None) -> float:
        """Return how long the generation that this plan forms may pause, beyond what forming takes."""
        if plan is None or plan.phase is not Phase.FORMING or plan.failure is None or plan.free:
            return 0.0
        if not plan.budget.in_a_row or plan.notice is not None:
            return 0.0
        return min(2.0 ** (plan.budget.in_a_row - 1), LONGEST_PAUSE_S)

    def gave_up(self, before: Plan) -> None:
        """The run failed for a failure that repeated: by its truth, it may be the one of the generation before."""
        (previous, _), (ended, charged) = self._sealed[-2:] if len(self._sealed) > 1 else [(0, False)] * 2
        job = self.cluster.job
        first, second = ({failure.signature for failure in job.of(g).failures} for g in (previous, ended))
        is_known = before.world is not None and ended == before.world.generation and charged
        self.checker.require(
            is_known and bool((first & second) - {""}),
            "only what repeats ends a run early",
            f"{before.reason!r} did not repeat",
        )


def least_s(policy: Policy) -> float:
    """Return how long a world has to run until that counts as progress."""
    return min(PROGRESS_S, policy.restart_window_s) if policy.restart_window_s > 0 else PROGRESS_S


def _forgiven(plan: Plan) -> int:
    """Return how many failures are forgiven when the next one is charged."""
    if plan.policy.restart_window_s <= 0:
        return 0
    windows = int(plan.budget.progress_s // plan.policy.restart_window_s)
    return min(windows, plan.charged - plan.budget.forgiven)


def counting(plan: Plan) -> int:
    """Return how many failures count against the budget when another one is to be charged."""
    return plan.charged - plan.budget.forgiven - _forgiven(plan)
