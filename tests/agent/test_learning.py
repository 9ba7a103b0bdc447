"""An agent learns what its script imports, and starts the next workers with that preloaded."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cli.support import clean_environment

pytestmark = pytest.mark.timeout(200)

AGENT = (sys.executable, "-m", "elastic_agent")

TRAIN = """
import json, os, sys
import torch
preloaded = "PIL.Image" in sys.modules
from PIL import Image
import mine
saved = dict(os.environ)
os.environ.clear()
os.environ.update(saved)  # as accelerate does, for a moment: no change
report = {
    "generation": int(os.environ["ELASTIC_AGENT_GENERATION"]),
    "preloaded": preloaded,
    "size": Image.new("L", (3, 2)).size,
    "mine": mine.VALUE,
}
sys.stdout.write(json.dumps(report) + "\\n")
import time
while not os.path.exists(f"go-{os.environ['ELASTIC_AGENT_GENERATION']}"):
    time.sleep(0.05)
sys.exit(int(sys.argv[1]))
"""


class Job:
    """A script in a folder of its own, with a module of its own beside it, and a state directory."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.state = folder / "state"
        (folder / "train.py").write_text(TRAIN)
        (folder / "mine.py").write_text("VALUE = 1")

    @contextmanager
    def agent(self, *options: str, code: int = 1) -> Iterator[subprocess.Popen[str]]:
        environment = {**clean_environment(), "ELASTIC_AGENT_STATE_DIR": str(self.state)}
        command = [*AGENT, "--nproc-per-node", "2", *options, "train.py", str(code)]
        with subprocess.Popen(
            command,
            cwd=self.folder,
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as agent:
            try:
                yield agent
            finally:
                agent.terminate()
                agent.communicate()

    def reports(self, agent: subprocess.Popen[str]) -> list[dict[str, Any]]:
        """What both workers of a generation report."""
        assert agent.stdout is not None
        return [json.loads(agent.stdout.readline()) for _ in range(2)]

    def let_generation_end(self, generation: int) -> None:
        (self.folder / f"go-{generation}").touch()

    def learned(self) -> dict[str, Any]:
        """The content of the verdict's file."""
        (path,) = [one for one in (self.state / "preload").iterdir() if "reported" not in one.name]
        found: dict[str, Any] = json.loads(path.read_text())
        return found


def until(agent: subprocess.Popen[str], words: str) -> str:
    """The next line of the log that contains these words."""
    assert agent.stderr is not None
    seen = []
    for line in agent.stderr:
        seen.append(line)
        if words in line:
            return line
    raise AssertionError(f"no line with {words!r}: {''.join(seen)}")


def test_the_next_workers_and_the_next_run_have_preloaded_what_the_first_imported(tmp_path: Path) -> None:
    job = Job(tmp_path)
    with job.agent() as agent:
        first = job.reports(agent)
        forge_report(agent.pid)
        until(agent, "learned which modules train.py imports")
        job.let_generation_end(1)
        second = job.reports(agent)
    assert [one["preloaded"] for one in first] == [False, False]
    assert [(one["preloaded"], one["generation"]) for one in second] == [(True, 2), (True, 2)]
    assert [(one["size"], one["mine"]) for one in second] == [([3, 2], 1)] * 2
    names = job.learned()["names"]
    assert "PIL.Image" in names
    assert not {"mine", "__main__", "elastic_agent", "antigravity"} & {
        name.partition(".")[0] for name in names
    }
    (tmp_path / "mine.py").write_text("VALUE = 22")
    with job.agent(code=0) as agent:
        assert [(one["preloaded"], one["mine"]) for one in job.reports(agent)] == [(True, 22)] * 2
        assert agent.wait(60) == 0
        assert agent.stderr is not None
        assert "elastic-agent:" not in agent.stderr.read()
    with job.agent("--no-learn-preload") as agent:
        assert [one["preloaded"] for one in job.reports(agent)] == [False, False]
    # The script now sets a variable that a learned module reads: this module is not preloaded any more.
    script = (tmp_path / "train.py").read_text()
    (tmp_path / "train.py").write_text("import os\nos.environ['PILLOW_BLOCK_SIZE'] = '64k'\n" + script)
    with job.agent() as agent:
        assert [one["preloaded"] for one in job.reports(agent)] == [False, False]
        assert "reads PILLOW_BLOCK_SIZE, which the script sets before" in until(agent, "is not preloaded")


def test_nothing_is_learned_when_that_is_disabled(tmp_path: Path) -> None:
    job = Job(tmp_path)
    job.let_generation_end(1)
    with job.agent("--no-learn-preload", code=0) as agent:
        assert len(job.reports(agent)) == 2
        assert agent.wait(60) == 0
    assert not (job.state / "preload").exists()


def forge_report(agent_pid: int) -> None:
    """Send the agent a report as another user, if this test can be one."""
    if os.geteuid() != 0:
        return
    names = Path("/proc/net/unix").read_text().split()
    (address,) = [name[1:] for name in names if name.startswith(f"@elastic-agent-imports/0/{agent_pid}-")]
    forged = json.dumps({"slot": 0, "names": ["antigravity"], "changed": {}})
    code = (
        "import os, socket, sys\nos.setuid(61002)\n"
        "socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM).sendto(sys.argv[2].encode(), '\\0' + sys.argv[1])"
    )
    subprocess.run([sys.executable, "-c", code, address, forged], check=True)
