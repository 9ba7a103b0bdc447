"""What a script does while it runs gives the same as under ``python -u``, however it is started."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from .launchers import BARE, GUARDED_WARM, SCRIPTS, Job, Launcher, functions_of, launchers, run_everywhere

BEHAVIOURS = SCRIPTS / "behaviours.py"
THINGS = functions_of(BEHAVIOURS, "thing")


@launchers(GUARDED_WARM)
def test_scripts_behave_as_under_plain_python(launcher: Launcher, tmp_path: Path) -> None:
    outcomes = run_everywhere(Job(str(BEHAVIOURS), cwd=tmp_path), tmp_path, [BARE, launcher])
    found: dict[str, dict[str, Any]] = {}
    for name, outcome in outcomes.items():
        assert outcome.worker(0, 0).code == 0, f"{name}: {outcome}"
        found[name] = json.loads((tmp_path / name / "things.json").read_text())
    seen, expected = found[launcher.name], found[BARE.name]
    assert expected.keys() == {*THINGS}
    failed = {thing: told for thing, told in expected.items() if isinstance(told, dict) and "failed" in told}
    assert failed == {}, "under python -u"
    for thing in THINGS:
        assert seen[thing] == expected[thing], (
            f"{thing}: {seen[thing]!r}\nunder python -u: {expected[thing]!r}"
        )
