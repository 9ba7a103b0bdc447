"""Deliberate bugs without a directed scenario: random seeds or the table tests of the protocol detect them."""

from __future__ import annotations

import subprocess
import sys

import pytest

from . import pure_mutants, seeded_mutants
from .run import catch

pytestmark = pytest.mark.prove


@pytest.mark.parametrize("name", sorted(seeded_mutants.MUTANTS))
def test_the_checker_detects_a_deliberate_bug(name: str) -> None:
    mutant = seeded_mutants.MUTANTS[name]
    assert catch(mutant) is not None, f"{mutant.what}: not detected within {mutant.seeds} seeds"


@pytest.mark.parametrize("name", sorted(pure_mutants.MUTANTS))
def test_the_table_tests_of_the_protocol_detect_a_deliberate_bug(name: str) -> None:
    command = [sys.executable, "-m", "tests.simulator.pure_mutants", name]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    assert found.returncode == 0, found.stdout + found.stderr
