"""The checker detects every deliberate bug; in a file of its own, so that another process can run it."""

from __future__ import annotations

import pytest

from .mutants import MUTANTS
from .run import catch


@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", sorted(MUTANTS))
def test_the_checker_detects_a_deliberate_bug(name: str) -> None:
    mutant = MUTANTS[name]
    assert catch(mutant) is not None, f"{mutant.what}: not detected within {mutant.seeds} seeds"
