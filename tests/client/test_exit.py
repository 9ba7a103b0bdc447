"""How a worker that uses the client ends."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from tests.client.support import launched
from tests.endings import ENDS_WHILE_A_COLLECTIVE_COMPLETES
from tests.waiting import GUARD_S


def test_a_worker_that_ends_while_a_collective_completes_is_not_aborted(tmp_path: Path) -> None:
    script = "from elastic_agent import client\n" + ENDS_WHILE_A_COLLECTIVE_COMPLETES
    workers = [
        subprocess.Popen(
            [sys.executable, "-c", script, str(rank), str(tmp_path / "meet")],
            env=launched({}),
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in (0, 1)
    ]
    try:
        said = [worker.communicate(timeout=GUARD_S)[1] for worker in workers]
    finally:
        for worker in workers:
            worker.kill()
            worker.wait()
    assert [worker.returncode for worker in workers] == [0, 0], said
