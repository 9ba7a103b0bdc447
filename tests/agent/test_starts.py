"""Workers that cannot be started at all."""

from __future__ import annotations

from pathlib import Path

from tests.cli.support import elastic_agent


def test_a_program_that_cannot_be_started_ends_the_run_in_good_order(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    options = ["--state-dir", str(tmp_path / "state"), "--max-restarts", "1", "--log-format", "console"]
    result = elastic_agent(*options, "--no-python", str(program))
    assert result.returncode == 1, result.stderr
    assert "could not start its workers: cannot start" in result.stderr
    assert "Traceback" not in result.stderr
