"""docs/settings.md says what is so."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.config.settings import Spec, specs
from elastic_agent.exit_codes import MEANINGS, ExitCode

REPOSITORY = Path(__file__).parents[2]
PAGE = REPOSITORY / "docs" / "settings.md"
MAKER = REPOSITORY / "tools" / "settings_page.py"


def test_the_page_is_the_one_made_from_the_settings() -> None:
    made = subprocess.run([sys.executable, MAKER], capture_output=True, text=True, check=True).stdout
    assert PAGE.read_text(encoding="utf-8") == made, "run: python tools/settings_page.py > docs/settings.md"


@pytest.mark.parametrize("spec", [pytest.param(spec, id=spec.name) for spec in specs()])
def test_the_page_lists_each_setting_with_its_default_and_variables(spec: Spec) -> None:
    (row,) = [
        line for line in PAGE.read_text(encoding="utf-8").splitlines() if f"<br>`{spec.name}` |" in line
    ]
    name, default, meaning = (cell.strip() for cell in row.strip("|").split(" | "))
    assert name.startswith(f"`{spec.flag}")
    assert default.strip("`") == spec.shown_default
    assert spec.help in meaning
    for variable in spec.variables:
        assert f"`{variable}`" in meaning


def test_the_page_lists_every_exit_code() -> None:
    page = PAGE.read_text(encoding="utf-8")
    assert set(MEANINGS) == set(ExitCode)
    for code, meaning in MEANINGS.items():
        assert f"| {int(code)} | {meaning} |" in page


def test_exit_codes_do_not_change() -> None:
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
