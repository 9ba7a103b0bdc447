"""The checker detects every deliberate bug, a sixth of them in each run of the suite."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS
from .run import catch


@pytest.mark.rotates(6)
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_checker_detects_a_deliberate_bug(name: str) -> None:
    mutant = MUTANTS[name]
    assert catch(mutant) is not None, f"{mutant.what}: not detected within {mutant.seeds} seeds"
