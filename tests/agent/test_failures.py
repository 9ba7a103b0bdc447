"""What becomes of workers that fail in odd ways, and of what they say: as a user sees it."""

from __future__ import annotations

import json
import re
import textwrap
from pathlib import Path

import pytest

from tests.agent.support import COMMAND, elastic_agent
from tests.processes import TAKE_A_CUT_NAME, process_with_a_cut_name
from tests.small_disk import run_on_small_disk


def run(folder: Path, script: str, *options: str) -> tuple[int, str]:
    """Exit code and log of a run on one node; cold workers, as they start sooner with so little to import."""
    (folder / "train.py").write_text(textwrap.dedent(script))
    state = ("--state-dir", str(folder / "state"), "--worker-start", "cold", "--log-format", "json")
    result = elastic_agent(*state, *options, str(folder / "train.py"))
    return result.returncode, result.stderr


@pytest.mark.prove
def test_an_error_with_a_non_utf_8_file_name_costs_one_restart(tmp_path: Path) -> None:
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


def test_a_hanging_worker_whose_name_was_cut_within_a_character_is_restarted(tmp_path: Path) -> None:
    """Its stacks are asked for first, for which the process is looked at. One of that name runs elsewhere, too."""
    hang = """
        import os, signal
        from elastic_agent import client
        if os.environ["ELASTIC_AGENT_GENERATION"] == "1":  # only workers with heartbeats can be late with one
            client.heartbeat()
            signal.pause()
    """
    with process_with_a_cut_name():
        script = TAKE_A_CUT_NAME + textwrap.dedent(hang)
        code, log = run(tmp_path, script, "--max-restarts", "1", "--hang-timeout", "0.5")
    assert code == 0, log
    assert re.search(r"made no progress for [0-9.]+ s \(--hang-timeout\)", log), log
    assert "workers are writing their stacks" in log


@pytest.mark.prove
def test_pipes_in_place_of_a_workers_files_do_not_block_the_agent(tmp_path: Path) -> None:
    script = """
        import os, sys
        error_file = os.environ["TORCHELASTIC_ERROR_FILE"]
        stderr_log = os.path.join(os.path.dirname(error_file), "stderr.log")
        if os.environ["ELASTIC_AGENT_GENERATION"] == "1":
            os.unlink(stderr_log)
            for path in (error_file, stderr_log):
                os.mkfifo(path)
            sys.exit(7)
    """
    code, log = run(tmp_path, script, "--max-restarts", "1", "--redirects", "3")
    assert code == 0, log
    assert "exited with code 7" in log


@pytest.mark.prove
def test_a_full_output_disk_is_reported_as_the_cause(tmp_path: Path) -> None:
    """The error itself cannot be written there."""
    script = tmp_path / "train.py"
    script.write_text("import os; os.write(1, bytes(60_000)); raise RuntimeError('x' * 60_000)")
    logs = tmp_path / "logs"
    logs.mkdir()
    options = ["--max-restarts", "0", "--redirects", "3", "--log-dir", str(logs), "--worker-start", "cold"]
    agent = [*COMMAND, "--state-dir", str(tmp_path / "state"), *options, str(script)]
    done = run_on_small_disk(logs, "64k", agent)
    assert done.returncode == 1, done.stderr
    assert "exited with code 1 (no space for its output: No space left on device, see df " in done.stderr
    assert str(logs) in done.stderr


@pytest.mark.prove
def test_output_that_was_not_kept_is_not_recommended_for_reading(tmp_path: Path) -> None:
    """The reason is on the standard output of a worker that the console does not show."""
    script = "import os, sys; print('no such device'); sys.exit(3 * int(os.environ['LOCAL_RANK']))"
    two = ("--max-restarts", "0", "--nproc-per-node", "2")
    _, log = run(tmp_path, script, *two, "--local-ranks-filter", "0")
    assert re.search(
        r"output of worker \S+/1 was not kept \(--local-ranks-filter\); start with --redirects 3", log
    ), log
    assert "read the end" not in log

    _, log = run(tmp_path, script, *two, "--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    found = re.search(r"read the end of the output of worker \S+/1,(?:\\n)? +(\S+?),", log)
    assert found is not None, log
    assert "no such device" in Path(found[1]).read_text()


@pytest.mark.prove
def test_a_file_without_output_is_not_recommended_for_reading(tmp_path: Path) -> None:
    files = ("--max-restarts", "0", "--redirects", "3", "--log-dir", str(tmp_path / "logs"))
    _, log = run(tmp_path, "import sys; print('no such device', file=sys.stderr); sys.exit(3)", *files)
    assert re.search(r"read the end of the output of worker \S+/0,(?:\\n)? +\S+/stderr.log,", log), log
    _, log = run(tmp_path, "import sys; sys.exit(3)", *files)
    assert "exited with code 3" in log
    assert "read the end" not in log


BAD = "import sys; print('step 1', file=sys.stderr)\nraise ValueError('bad label')  # here"


@pytest.mark.parametrize(
    ("options", "times"),
    [
        pytest.param((), 1, id="on the console"),
        pytest.param(("--redirects", "2"), 1, id="in a file", marks=pytest.mark.prove),
        pytest.param(("--log-format", "json"), 2, id="as fields for programs", marks=pytest.mark.prove),
    ],
)
def test_a_traceback_is_shown_once_where_people_read(
    tmp_path: Path, options: tuple[str, ...], times: int
) -> None:
    _, log = run(tmp_path, BAD, "--max-restarts", "0", "--log-format", "console", *options)
    assert log.count("raise ValueError") == times, log
    assert "exited with code 1: ValueError: bad label" in log


@pytest.mark.prove
def test_an_error_that_another_attempt_does_not_cure_is_tried_once_more(tmp_path: Path) -> None:
    script = """raise RuntimeError("Distributed package doesn't have NCCL built in")"""
    code, log = run(tmp_path, script, "--max-restarts", "3", "--restart-backoff", "0")
    assert code != 0
    assert log.count("exited with code 1: RuntimeError: Distributed package") >= 2, log
    assert "the same failure repeated without progress" in log, log
    assert "generation 3: 1 node" not in log, log
