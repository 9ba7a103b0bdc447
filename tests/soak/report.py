"""The table that a soak test ends with."""

from __future__ import annotations

from collections import Counter
from statistics import median

from .counts import MIB, Agent
from .soak import Result

FLAT = 1 * MIB
"""By how much the memory of an agent may differ between the third quarter of its time and the last one. In the first
half hour it grows by some MiB before it levels off."""


def memory(witness: list[Agent]) -> tuple[float, float] | None:
    """Bytes in the third quarter and in the last one (medians); None if there are too few samples."""
    if len(witness) < 8:
        return None
    used = [sample.memory for sample in witness]
    quarter = len(used) // 4
    return median(used[2 * quarter : 3 * quarter]), median(used[-quarter:])


def memory_problem(witness: list[Agent]) -> str | None:
    """Return what is wrong with the memory of the agent that was watched."""
    found = memory(witness)
    if found is None or found[1] - found[0] <= FLAT:
        return None
    return f"the memory of an agent grew from {found[0] / MIB:.1f} to {found[1] / MIB:.1f} MiB"


def table(result: Result) -> str:
    """As rows of Markdown."""
    hits = result.hits
    kinds = Counter(name for hit in hits for name in hit.names)
    recoveries = sorted(hit.recovery_s for hit in hits)
    wholes = sorted(hit.whole_s for hit in hits)
    rows = [
        ("backend", result.backend),
        ("time", f"{result.took_s / 60:.0f} min"),
        ("faults", f"{sum(kinds.values())} ({sum(len(hit.names) > 1 for hit in hits)} pairs)"),
        *((f"- {name}", str(count)) for name, count in kinds.most_common()),
        ("generations", str(result.generations)),
        ("training steps", str(result.steps)),
        ("fault to the next training step, median, 95 %, longest", _spread(recoveries)),
        ("repair to a step of all nodes, median, 95 %, longest", _spread(wholes)),
    ]
    if result.before and result.after:
        was, now = result.before.numbers(), result.after.numbers()
        rows += [(f"{name}, first and last", f"{was[name]} → {now[name]}") for name in was]
    found = memory(result.witness)
    if found:
        ages = result.witness[-1].age_s - result.witness[0].age_s
        rows.append(
            (
                "memory of one agent, third and last quarter of its time",
                f"{found[0] / MIB:.1f} → {found[1] / MIB:.1f} MiB, watched for {ages / 60:.0f} min",
            )
        )
        spread = [sample.descriptors for sample in result.witness]
        rows.append(("its descriptors, smallest and largest", f"{min(spread)}, {max(spread)}"))
    rows.append(("problems", "; ".join(result.problems) or "none"))
    return "\n".join(["| | |", "| --- | --- |", *(f"| {name} | {value} |" for name, value in rows)])


def _spread(values: list[float]) -> str:
    if not values:
        return "none"
    return f"{median(values):.1f} s, {values[int(0.95 * (len(values) - 1))]:.1f} s, {values[-1]:.1f} s"
