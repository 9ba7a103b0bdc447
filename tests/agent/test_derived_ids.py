"""Node ids derived from the host's name, on machines that have the same name."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.agent.identity import host_name
from tests.agent.support import PATIENCE_S, started
from tests.names import unique
from tests.ports import free_port


@pytest.mark.prove
def test_two_machines_with_the_same_host_name_both_take_part(tmp_path: Path) -> None:
    """The second one is refused, takes the next free id, and its workers run (all the guard says was said before)."""
    script = tmp_path / "show.py"
    script.write_text("import os; print(os.environ['ELASTIC_AGENT_NODE_ID'], os.environ['WORLD_SIZE'])")
    endpoint = f"127.0.0.1:{free_port()}"
    options = ["--rdzv-endpoint", endpoint, "--rdzv-id", unique("twins"), "--nnodes", "2"]
    options += ["--lease-ttl", "10"]  # the refused agent's lease has to run out
    first, second = (
        started(*options, "--state-dir", str(tmp_path / name), str(script)) for name in ("one", "other")
    )
    with first as one, second as other:
        agents = [one.process, other.process]
        said = [agent.communicate(timeout=PATIENCE_S)[0] for agent in agents]
    # A stall of the machine may cost a lease, and the workers run again.
    different = sorted(line for lines in said for line in {*lines.splitlines()})
    assert different == [f"{host_name()} 2", f"{host_name()}-2 2"]
    assert [agent.returncode for agent in agents] == [0, 0]
