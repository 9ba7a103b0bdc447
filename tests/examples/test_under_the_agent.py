"""The examples under real agents: what a newcomer sees first."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.cli.support import clean_environment, elastic_agent

EXAMPLES = Path(__file__).parents[2] / "examples"
pytestmark = [pytest.mark.system, pytest.mark.prove]


def run_example(folder: Path, name: str) -> subprocess.CompletedProcess[str]:
    """Run an example with two workers."""
    options = ("--log-format", "console", "--state-dir", str(folder), "--nproc-per-node", "2")
    return elastic_agent(*options, str(EXAMPLES / name))


def test_hello_adds_up_the_ranks_of_two_workers(tmp_path: Path) -> None:
    """The first thing to try: one machine, no options of a rendezvous."""
    done = run_example(tmp_path, "hello.py")
    assert done.returncode == 0, done.stdout + done.stderr
    for rank in range(2):
        assert f"hello from rank {rank} of 2; our ranks add up to 1" in done.stdout


def test_the_demo_ends_well_and_leaves_nothing() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    # The demo has a limit of its own and then stops its agents; killed here, it could not.
    demo = subprocess.run(
        [sys.executable, EXAMPLES / "demo.py"], env=clean_environment(), capture_output=True, text=True
    )
    assert demo.returncode == 0, demo.stdout + demo.stderr
    assert re.search(r"resumed   from the checkpoint of step \d+$", demo.stdout, re.M)
    pids = {int(pid) for pid in re.findall(r"started worker=\S+ pid=(\d+)", demo.stdout)}
    assert len(pids) == 6
    assert not [pid for pid in pids if psutil.pid_exists(pid)]
    assert {child.pid for child in psutil.Process().children(recursive=True)} == before


def test_identity_shows_which_names_survive_a_restart(tmp_path: Path) -> None:
    result = run_example(tmp_path, "identity.py")
    assert result.returncode == 0, result.stdout + result.stderr
    seen = re.findall(
        r"generation (\d+):  stays: run (\S+), node (\S+), worker (\S+) .* process (\d+)", result.stdout
    )
    generations = sorted({int(generation) for generation, *_ in seen})
    assert len(generations) == 2
    first, second = ({tuple(names) for g, *names, _ in seen if int(g) == number} for number in generations)
    assert len(first) == 2
    assert first == second
    assert len({pid for *_, pid in seen}) == 4


def test_ctrl_c_ends_the_demo_and_all_it_started(tmp_path: Path) -> None:
    demo = subprocess.Popen(
        [sys.executable, EXAMPLES / "demo.py"],
        env={**clean_environment(), "TMPDIR": str(tmp_path)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert demo.stdout is not None
    family: list[psutil.Process] = []
    for line in demo.stdout:
        if "digits: step=" in line:
            family = psutil.Process(demo.pid).children(recursive=True)
            break
    assert len(family) >= 5  # two agents and three workers
    demo.send_signal(signal.SIGINT)
    output, _ = demo.communicate(timeout=90)
    assert demo.returncode == 130, output
    psutil.wait_procs(family, timeout=5)
    assert not [process for process in family if process.is_running()]
    assert not list(tmp_path.glob("elastic-agent*"))
