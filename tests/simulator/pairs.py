"""Which faults a seed draws alone, so that every pair of kinds meets often: rare pairs hide in a mixture of many."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import combinations

from .scenario import ETCD, FAULTS, HOSTINGS

ONLY_ETCD = frozenset(ETCD) - frozenset(FAULTS)
ONLY_C10D = frozenset({"store crash", "store freeze", "state lost"})


@dataclass(frozen=True)
class Draw:
    """What of a scenario is given rather than drawn from the seed."""

    focus: tuple[str, ...] = ()
    """The only kinds of faults; none: drawn."""
    hosting: str | None = None
    """Where the store lives; None: drawn."""


ANYTHING = Draw()


def _pairs() -> list[Draw]:
    kinds = sorted({*FAULTS, *ETCD})
    draws = []
    for hosting in HOSTINGS:
        barred = ONLY_C10D if hosting == "etcd" else ONLY_ETCD
        allowed = [kind for kind in kinds if kind not in barred]
        draws += [Draw(pair, hosting) for pair in combinations(allowed, 2)]
    return draws


PAIRS = _pairs()
"""Every pair of kinds that can occur together, with every place where the store may live."""

STRIDE = 997
"""Prime, and no divisor of the number of pairs: consecutive seeds draw very different pairs, all in turn."""


def pair_of(seed: int) -> Draw:
    """The pair that this seed draws; in ``len(PAIRS)`` consecutive seeds every one occurs once."""
    return PAIRS[seed * STRIDE % len(PAIRS)]
