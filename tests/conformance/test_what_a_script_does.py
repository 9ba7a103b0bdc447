"""What a script does while it runs gives the same as under ``python -u``, however it is started."""

from __future__ import annotations

import json
from typing import Any

import pytest

from .launchers import BARE, LAUNCHERS, SCRIPTS, Job, run_everywhere
from .tables import functions_of

pytestmark = pytest.mark.timeout(300)

BEHAVIOURS = SCRIPTS / "behaviours.py"
THINGS = functions_of(BEHAVIOURS, "thing")

Things = dict[str, Any]


@pytest.fixture(scope="module")
def done(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Things]:
    """What came of everything, by launcher."""
    folder = tmp_path_factory.mktemp("things")
    outcomes = run_everywhere(Job(str(BEHAVIOURS), cwd=folder), folder)
    for name, outcome in outcomes.items():
        assert outcome.worker(0, 0).code == 0, f"{name}: {outcome}"
    return {name: json.loads((folder / name / "things.json").read_text()) for name in outcomes}


@pytest.mark.parametrize("launcher", [one.name for one in LAUNCHERS])
@pytest.mark.parametrize("thing", THINGS)
def test_scripts_behave_as_under_plain_python(done: dict[str, Things], launcher: str, thing: str) -> None:
    seen, expected = done[launcher][thing], done[BARE.name][thing]
    assert not (isinstance(expected, dict) and "failed" in expected), (
        f"{thing} fails under python -u: {expected}"
    )
    assert seen == expected, f"{thing}: {seen!r}\nunder python -u: {expected!r}"
