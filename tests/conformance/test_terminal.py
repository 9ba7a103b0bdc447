"""A worker on a terminal: its streams are what they are under ``python -u``."""

from __future__ import annotations

import json
from pathlib import Path

from .launchers import BARE, WARM, Job, Launcher, launchers, run_everywhere


@launchers(WARM)
def test_streams_of_workers_are_a_terminal_if_the_agents_are(launcher: Launcher, tmp_path: Path) -> None:
    outcomes = run_everywhere(Job("terminal.py", terminal=True), tmp_path, [BARE, launcher])
    seen, expected = (
        json.loads((tmp_path / one.name / "terminal.json").read_text()) for one in (launcher, BARE)
    )
    assert expected.keys() == {"stdin", "stdout", "stderr", "controlling terminal"}
    assert seen == expected
    said = outcomes[launcher.name].said
    assert "a word on stdout" in said
    assert "a word on stderr" in said
