"""docs/settings.md says what is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from elastic_agent.exit_codes import MEANINGS, ExitCode

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "settings.md"
MAKER = REPOSITORY / "tools" / "settings_page.py"


def test_the_page_is_the_one_made_from_the_settings() -> None:
    made = subprocess.run([sys.executable, MAKER], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text(encoding="utf-8") == made, "run: python tools/settings_page.py > docs/settings.md"


def test_exit_codes_do_not_change() -> None:
    assert set(MEANINGS) == set(ExitCode), "docs/troubleshooting.md lists these"
    assert {code.name: code.value for code in ExitCode} == {
        "FINISHED": 0,
        "FAILED": 1,
        "USAGE": 2,
        "TOO_FEW_NODES": 3,
        "NO_STORE": 4,
        "REFUSED": 5,
        "DRAINED": 6,
        "NOT_STOPPED": 7,
        "INTERNAL": 70,
        "STOPPED": 75,
        "INTERRUPTED": 130,
        "TERMINATED": 143,
    }
