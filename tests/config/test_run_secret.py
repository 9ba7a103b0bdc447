"""Where the secret of a run comes from, and which files are refused."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.secrets import new_secret, run_secret

TEXT = "0123456789abcdef0123"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text(f"{TEXT}\n")
    path.chmod(0o600)
    return path


def problem(file: Path | None, environ: dict[str, str] | None = None, variable: str | None = None) -> str:
    with pytest.raises(UsageError) as caught:
        run_secret(file, environ or {}, variable)
    return str(caught.value)


def test_a_file_counts_before_a_credential_and_that_before_the_variable(file: Path, tmp_path: Path) -> None:
    folder = tmp_path / "credentials"
    folder.mkdir()
    credential = folder / "elastic-agent-secret"
    credential.write_text("the secret that systemd hands over")
    environ = {"CREDENTIALS_DIRECTORY": str(folder)}
    assert run_secret(file, environ, "x" * 20) == (TEXT.encode(),)
    assert run_secret(None, environ, "x" * 20) == (b"the secret that systemd hands over",)
    credential.unlink()
    assert run_secret(None, environ, "x" * 20) == (b"x" * 20,)
    assert run_secret(None, environ, None) == ()


def test_two_lines_are_a_rotation(file: Path) -> None:
    file.write_text(f"{new_secret()}\n\n{TEXT}\n")
    found = run_secret(file, {}, None)
    assert len(found) == 2
    assert found[1] == TEXT.encode()


@pytest.mark.parametrize("mode", [0o640, 0o604, 0o620, 0o602])
def test_a_file_that_others_can_read_or_write_is_refused(file: Path, mode: int) -> None:
    file.chmod(mode)
    assert f"mode {mode:04o}); expected 0600: chmod 600 {file}" in problem(file)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give files away")
def test_a_file_of_another_user_is_refused(file: Path) -> None:
    os.chown(file, 12345, -1)
    assert "belongs to user 12345; expected this user" in problem(file)


def test_what_is_no_secret_is_refused(file: Path, tmp_path: Path) -> None:
    assert "No such file" in problem(tmp_path / "none")
    assert "not a regular file" in problem(Path("/dev/null"))
    for text, words in (("", "no lines"), ("a\n" * 3, "3 lines"), ("short", "at least 16 characters")):
        file.write_text(text)
        assert words in problem(file)
    assert "ELASTIC_AGENT_SECRET: no lines" in problem(None, variable=""), (
        "the command that was to set it failed"
    )
    assert "ELASTIC_AGENT_SECRET: expected a secret of at least 16" in problem(None, variable="short")
