"""The share of a node's time in which the training advanced. Pure: times are arguments.

The definition is the one of Meta's effective training time ratio (ETTR) and of Google's goodput: productive time
divided by the whole time of the run. Training is productive unless its steps were repeated: when workers resume from a
checkpoint, the time since the step of that checkpoint was reached is moved from *training* to *repeated*. So is the
time in which a worker that hung completed no step.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Collection, Mapping

from msgspec import Struct

from elastic_agent.diagnosis.records import Activity, Goodput

MOST_MARKS = 500
"""Of how many steps the time is kept; between them it is interpolated."""


class RunGoodput(Struct, frozen=True, omit_defaults=True):
    """The accounts of several nodes of a run, added up."""

    spent: Goodput
    nodes: int
    missing: int = 0
    """Further nodes of the world, which have not reported theirs."""


def sum_goodput(reported: Mapping[str, Goodput], world: Collection[str] = ()) -> RunGoodput | None:
    """The sum of what nodes reported, by node id; None without any. ``world``: the nodes that train."""
    if not reported:
        return None
    accounts = reported.values()
    seconds = {f"{one.value}_s": sum(node.spent_s(one) for node in accounts) for one in Activity}
    spent = Goodput(**seconds, knows_steps=all(one.knows_steps for one in accounts))
    return RunGoodput(spent, len(reported), len(set(world) - reported.keys()))


class SavedGoodput(Struct, frozen=True, omit_defaults=True):
    """What the next start of the agent needs to continue the account."""

    goodput: Goodput
    saved_s: float
    """Seconds since 1970."""
    marks: tuple[tuple[int, float], ...] = ()
    """Steps, and how many seconds of training it took to reach them."""
    outcome: str = ""
    """How the node's part ended; empty while it takes part."""


class Account:
    """Counts the time of one node; times are seconds of a clock that does not jump."""

    def __init__(self, now_s: float) -> None:
        """The node waits."""
        self._spent = dict.fromkeys(Activity, 0.0)
        self._activity = Activity.WAITING
        self._since_s = self._counted_s = now_s
        self._runs = False
        """Workers run."""
        self.awaits_step = False
        """No step of the newest workers is known yet."""
        self._knows_steps = False
        self._trained_before_s = 0.0
        """Seconds of training when the newest workers were started."""
        self._trained_s = 0.0
        """The same when the last ones ended."""
        self._has_saved = False
        """They ended by themselves, so their last step counts until then."""
        self._marks: list[tuple[int, float]] = []
        """Steps in ascending order, and the seconds of training when they were reached."""

    # -- what happens ---------------------------------------------------------------------------

    def switch(self, activity: Activity, now_s: float) -> None:
        """From now on the time is spent on this."""
        self._count(now_s)
        if activity is not self._activity:
            self._activity, self._since_s = activity, now_s

    def misses_nodes(self, now_s: float) -> None:
        """The world cannot be formed without further nodes: all the time since its forming began was spent waiting."""
        if self._activity is Activity.FORMING:
            self._count(now_s)
            self._move(now_s - self._since_s, Activity.FORMING, Activity.WAITING)
            self.switch(Activity.WAITING, now_s)

    def workers_started(self, now_s: float) -> None:
        """All workers run. Until their first step they are starting, if it is known that they report steps."""
        self.switch(Activity.STARTING if self._knows_steps else Activity.TRAINING, now_s)
        self._runs = self.awaits_step = True
        self._trained_before_s = self._spent[Activity.TRAINING]

    def step(self, step: int, now_s: float) -> None:
        """A running worker has reported this step; 0 is none."""
        if step <= 0 or not self._runs:
            return
        self._count(now_s)
        if self.awaits_step:
            self.awaits_step, self._knows_steps = False, True
            assumed_s = self._spent[Activity.TRAINING] - self._trained_before_s
            self._move(assumed_s, Activity.TRAINING, Activity.STARTING)
            self._resume(step)
            self.switch(Activity.TRAINING, now_s)
        self._mark(step, self._spent[Activity.TRAINING])

    def workers_ended(
        self, activity: Activity, now_s: float, *, saved: bool, stalled_since_s: float | None = None
    ) -> None:
        """No worker trains any more.

        Args:
            activity: what follows.
            now_s: the present time.
            saved: they exited by themselves, after they had saved what they needed.
            stalled_since_s: they hung since then.
        """
        if self._runs:
            self._count(now_s)
            self._runs = False
            if stalled_since_s is not None and self._activity is Activity.TRAINING:
                self._move(now_s - stalled_since_s, Activity.TRAINING, Activity.REPEATED)
            self._trained_s = self._spent[Activity.TRAINING]
            self._has_saved = saved
        self.switch(activity, now_s)

    def did_not_train(self) -> bool:
        """The workers that ended did no training; return whether there was none before them either."""
        self._move(self._trained_s - self._trained_before_s, Activity.TRAINING, Activity.STARTING)
        self._trained_s = self._trained_before_s
        return not self._trained_before_s

    def last_step(self, step: int) -> None:
        """The last step of the workers that ended, which may become known only now."""
        if step > 0 and (self.awaits_step or not self._runs):
            self._knows_steps = True
            self._mark(step, self._trained_s)

    # -- the account ----------------------------------------------------------------------------

    def goodput(self, now_s: float) -> Goodput:
        """The account so far."""
        self._count(now_s)
        return Goodput(
            **{f"{one.value}_s": spent_s for one, spent_s in self._spent.items()},
            knows_steps=self._knows_steps,
        )

    def saved(self, now_s: float, time_s: float, outcome: str = "") -> SavedGoodput:
        """What the next start needs; ``time_s``: the present time, in seconds since 1970."""
        return SavedGoodput(self.goodput(now_s), time_s, tuple(self._marks), outcome)

    def take_over(self, before: SavedGoodput, time_s: float) -> None:
        """Continue the account of an earlier start of this node.

        Unless its part had ended in order, the node was down until it was started at ``time_s`` (seconds since 1970).
        """
        trained_s = before.goodput.training_s
        for one in Activity:
            self._spent[one] += before.goodput.spent_s(one)
        if not before.outcome:
            self._spent[Activity.DOWN] += max(0.0, time_s - before.saved_s)
        own = [(step, reached_s + trained_s) for step, reached_s in self._marks]
        self._marks = [*(one for one in before.marks if not own or one[0] < own[0][0]), *own]
        self._trained_before_s += trained_s
        self._trained_s += trained_s

    # -- steps ----------------------------------------------------------------------------------

    @property
    def reached(self) -> int:
        """The highest step that counts as trained; 0: none is known."""
        return self._marks[-1][0] if self._marks else 0

    def _resume(self, step: int) -> None:
        """Workers continue at this step: what was trained after it was reached for the first time is repeated."""
        if not self._marks:
            return
        reached_s = self._reached_s(step)
        self._move(self._spent[Activity.TRAINING] - reached_s, Activity.TRAINING, Activity.REPEATED)
        self._marks = [one for one in self._marks if one[0] < step]

    def _reached_s(self, step: int) -> float:
        """Seconds of training after which this step was reached; the last known ones if it was never reached."""
        after = bisect.bisect_right(self._marks, step, key=lambda one: one[0])
        if after == len(self._marks):
            return self._trained_s if self._has_saved else self._marks[-1][1]
        if after == 0:
            return self._marks[0][1]
        (low, low_s), (high, high_s) = self._marks[after - 1 : after + 1]
        return low_s + (high_s - low_s) * (step - low) / (high - low)

    def _mark(self, step: int, trained_s: float) -> None:
        if self._marks and step <= self._marks[-1][0]:
            return
        self._marks.append((step, trained_s))
        if len(self._marks) > MOST_MARKS:
            self._marks = [*itertools.islice(self._marks, 0, len(self._marks) - 1, 2), self._marks[-1]]

    # -- seconds --------------------------------------------------------------------------------

    def _count(self, now_s: float) -> None:
        self._spent[self._activity] += max(0.0, now_s - self._counted_s)
        self._counted_s = max(now_s, self._counted_s)

    def _move(self, length_s: float, source: Activity, target: Activity) -> None:
        length_s = min(max(0.0, length_s), self._spent[source])
        self._spent[source] -= length_s
        self._spent[target] += length_s
