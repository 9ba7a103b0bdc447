"""How many workers ``--nproc-per-node`` starts where the agent may use some of the machine's CPUs only."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from tests.cli.support import elastic_agent

pytestmark = pytest.mark.skipif(shutil.which("taskset") is None, reason="needs taskset (util-linux)")

CROWDED = "expected one or more CPUs per worker"


@pytest.mark.parametrize(("wanted", "workers"), [("auto", 1), ("cpu", 1), ("5", 5)])
def test_the_cpus_of_this_process_count(tmp_path: Path, wanted: str, workers: int) -> None:
    script = tmp_path / "train.py"
    script.write_text("import os\nos.write(1, f\"{os.environ['WORLD_SIZE']}\\n\".encode())\n")
    one = ("taskset", "-c", str(min(os.sched_getaffinity(0))))
    done = elastic_agent(
        "--nproc-per-node", wanted, str(script), variables={"CUDA_VISIBLE_DEVICES": ""}, under=one
    )
    assert done.stdout.split() == [str(workers)] * workers
    assert (CROWDED in done.stderr) == (workers > 4)
