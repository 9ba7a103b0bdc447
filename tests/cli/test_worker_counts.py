"""The workers that ``--nproc-per-node`` starts where the agent may use some of the machine's CPUs only."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.support import LONG_LEASE, elastic_agent

ON_ONE_CPU = """
import os, sys
os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
os.execv(sys.argv[1], sys.argv[1:])
"""


@pytest.mark.parametrize(
    ("wanted", "workers"),
    [
        ("auto", 1),
        pytest.param("cpu", 1, marks=pytest.mark.prove),
        pytest.param("5", 5, marks=pytest.mark.prove),
    ],
)
def test_the_cpus_of_this_process_count(tmp_path: Path, wanted: str, workers: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.write(1, f\"{os.environ['WORLD_SIZE']}\\n\".encode())\n")
    done = elastic_agent(
        *("--state-dir", str(tmp_path / "state"), "--nproc-per-node", wanted),
        *("--worker-start", "cold", str(script)),
        variables={**LONG_LEASE, "CUDA_VISIBLE_DEVICES": ""},
        under=[sys.executable, "-S", "-c", ON_ONE_CPU],
    )
    assert done.stdout.split() == [str(workers)] * workers
