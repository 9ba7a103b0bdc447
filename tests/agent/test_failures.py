"""What becomes of workers that fail in odd ways, and of what they say: as a user sees it."""

from __future__ import annotations

import json
import textwrap
from pathlib import Path

from tests.cli.support import elastic_agent
from tests.processes import TAKE_A_CUT_NAME, process_with_a_cut_name


def run(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Exit code and log of a run on one node; cold workers, as they start sooner with so little to import."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    state = ("--state-dir", str(folder / "state"), "--worker-start", "cold", "--log-format", "json")
    result = elastic_agent(*state, *options, str(folder / "train.py"))
    return result.returncode, result.stderr


def test_an_error_that_names_a_file_whose_name_is_no_utf_8_costs_one_restart(tmp_path: Path) -> None:
    """The error file is as torch's `@record` writes it."""
    script = """
        import json, os, sys
        if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
            path = os.fsdecode(b"caf\\xe9.jpg")
            error = {"message": f"ValueError: cannot read {path}", "extraInfo": {"py_callstack": path}}
            with open(os.environ["TORCHELASTIC_ERROR_FILE"], "w") as file:
                json.dump({"message": error}, file)
            sys.exit(1)
    """
    code, log = run(tmp_path, script, "--max-restarts", "1")
    assert code == 0, log
    messages = [json.loads(line)["message"] for line in log.splitlines() if line.startswith("{")]
    assert any(r"exited with code 1: ValueError: cannot read caf\udce9.jpg" in one for one in messages), log


def test_a_hanging_worker_whose_name_the_kernel_cut_within_a_character_is_restarted(tmp_path: Path) -> None:
    """Its stacks are asked for first, for which the process is looked at. One of that name runs elsewhere, too."""
    hang = """
        import os, signal
        from elastic_agent import client
        client.heartbeat()
        if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
            signal.pause()
    """
    with process_with_a_cut_name():
        script = TAKE_A_CUT_NAME + textwrap.dedent(hang)
        code, log = run(tmp_path, script, "--max-restarts", "1", "--hang-timeout", "0.5")
    assert code == 0, log
    assert "made no progress for 0.5 s" in log
    assert "workers write their stacks" in log
