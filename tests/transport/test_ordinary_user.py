"""Checks that what keeps other users out works without privileges: kernels allow root more than others."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.other_users import as_ordinary_user

ROOT = Path(__file__).parents[2]


@pytest.mark.prove
@pytest.mark.skipif(os.geteuid() != 0, reason="these tests run as an ordinary user anyway")
@pytest.mark.parametrize("name", ["hidden_listener", "store_relay", "secret_at_the_door"])
def test_an_ordinary_users_stores_are_kept_from_others(name: str, tmp_path: Path) -> None:
    done = subprocess.run(
        [
            *as_ordinary_user(tmp_path, "setuid"),
            *(sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"),
            f"tests/transport/test_{name}.py",
        ],
        cwd=ROOT,
        env={**os.environ, "PYTHONDONTWRITEBYTECODE": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "only root" not in done.stdout
