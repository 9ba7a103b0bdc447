"""Workers that are hard to start, or cannot be started at all."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest

from elastic_agent.agent.identity import host_name
from tests.agent.support import elastic_agent, options_for, started
from tests.ports import free_port


def test_a_program_that_cannot_be_started_ends_the_run_cleanly(tmp_path: Path) -> None:
    program = tmp_path / "program"
    program.write_text("#!/no/such/interpreter\n")
    program.chmod(0o755)
    options = ["--state-dir", str(tmp_path / "state"), "--max-restarts", "1", "--log-format", "console"]
    result = elastic_agent(*options, "--no-python", str(program))
    assert result.returncode == 1, result.stderr
    assert "could not start its workers: cannot start" in result.stderr
    assert "Traceback" not in result.stderr


@pytest.mark.prove
@pytest.mark.parametrize("words", [["train.py"], ["-m", "train"]], ids=["script", "module"])
def test_a_warm_worker_whose_script_was_removed_reports_what_is_missing(
    tmp_path: Path, words: list[str]
) -> None:
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "train.py").write_text("import os, shutil, sys; shutil.rmtree(os.getcwd()); sys.exit(1)\n")
    options = ["--state-dir", str(tmp_path / "state"), "--max-restarts", "1", "--worker-start", "warm"]
    result = elastic_agent(*options, *words, under=["env", "-C", str(folder)])
    assert result.returncode == 1
    assert "workers start cold" not in result.stderr
    missing = "can't open file 'train.py'" if words == ["train.py"] else "No module named train"
    assert f"the run failed: worker {host_name()}/0 exited with code" in result.stderr
    assert missing in result.stderr


@pytest.mark.parametrize("how", ["warm", "cold"])
def test_a_script_whose_name_is_not_utf_8_is_run(tmp_path: Path, how: str) -> None:
    script = os.fsdecode(b"caf\xe9.py")
    (tmp_path / script).write_text("import sys; print(ascii(sys.argv))\n")
    options = ["--state-dir", str(tmp_path / "state"), "--worker-start", how]
    result = elastic_agent(*options, script, under=["env", "-C", str(tmp_path)])
    assert (result.returncode, result.stdout) == (0, "['caf\\udce9.py']\n"), result.stderr


@pytest.mark.prove
def test_a_single_node_in_a_crash_loop_needs_only_one_port(tmp_path: Path) -> None:
    port = free_port()
    options = ["--standalone", "--port-range", f"{port}:{port}", "--max-restarts", "3"]
    options += ["--state-dir", str(tmp_path / "state"), "--log-format", "console"]
    result = elastic_agent(*options, "--no-python", "false")
    assert result.returncode == 1
    assert "exited with code 1; all 3 restarts are used" in result.stderr


SLOW = """
import os, sys, time

class UntilTold:
    def find_spec(self, name, path=None, target=None):
        while name == "torch" and not os.path.exists(os.environ["TOLD"]):
            time.sleep(0.05)

sys.meta_path.insert(0, UntilTold())
"""


@pytest.mark.system
@pytest.mark.parametrize("how", ["warm", "cold"])
def test_an_import_of_torch_that_takes_long_is_reported(tmp_path: Path, how: str) -> None:
    (tmp_path / "sitecustomize.py").write_text(SLOW)
    variables = {"PYTHONPATH": str(tmp_path), "TOLD": str(tmp_path / "told")}
    words = options_for(tmp_path, "print('trained')", "--worker-start", how)
    with started(*words, variables=variables) as agent:
        assert f"importing torch with {sys.executable}: " in agent.log_until("importing torch")
        (tmp_path / "told").touch()
        assert agent.line() == "trained"
        assert agent.end()[0] == 0
