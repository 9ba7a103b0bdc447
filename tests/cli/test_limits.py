"""A limit of this user under which torch cannot be loaded is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.support import elastic_agent
from tests.ports import free_port


def limited(option: str, limit: int) -> list[str]:
    """A command that runs another with a limit of the shell's."""
    return ["bash", "-c", f'ulimit {option} {limit}; exec "$@"', "bash"]


@pytest.mark.parametrize("start", ["serve", "--no-python"])
def test_a_limit_of_the_address_space_is_named_where_torch_cannot_be_loaded(
    start: str, tmp_path: Path
) -> None:
    state = ["--state-dir", str(tmp_path)]
    argv = {
        "serve": ["serve", *state, "--rdzv-endpoint", f"localhost:{free_port()}"],
        "--no-python": [*state, "--no-python", "true"],
    }
    ended = elastic_agent(*argv[start], under=limited("-v", 300_000))
    assert "before it had imported torch; its address space is limited to 307 MB: ulimit" in ended.stderr


def test_the_doctor_names_a_limit_of_the_address_space(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("print('trained')\n")
    argv = ["doctor", "--state-dir", str(tmp_path / "state"), str(script)]
    found = elastic_agent(*argv, under=limited("-v", 400_000))
    assert found.returncode == 1, found.stderr
    assert "cannot import torch" in found.stdout
    assert "a process can have only " in found.stdout
    assert "ulimit -v unlimited" in found.stdout
