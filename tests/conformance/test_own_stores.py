"""A script may host stores of its own beside the agent's, as under plain Python."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest

from tests.cli.support import elastic_agent
from tests.names import unique
from tests.ports import free_ports

from .launchers import PATIENCE_S, SCRIPTS


def printed(uses: str, start: str, folder: Path) -> dict[str, int]:
    done = elastic_agent(
        *("--rdzv-id", unique("stores"), "--state-dir", str(folder), "--lease-ttl", "60"),
        *("--nproc-per-node", "2", "--max-restarts", "0", "--worker-start", start, "--start-timeout", "600"),
        *(str(SCRIPTS / "own_stores.py"), uses, *map(str, free_ports(3))),
        patience_s=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.splitlines())


OWN = {"own store by address 2": 2, "own store of a spawn child 1": 1, "own store of a forkserver child 1": 1}


@pytest.mark.prove
@pytest.mark.parametrize(
    ("uses", "start", "expected"),
    [
        ("children", "warm", {**OWN, "agent's store in a child 2": 2}),
        ("own", "warm", {**OWN, "agent's store 2": 2}),
        ("own", "cold", {**OWN, "agent's store 2": 2}),
        ("address", "cold", {"agent's store by address 2": 2}),
    ],
)
def test_a_script_and_its_children_use_the_agents_store_and_host_others(
    uses: str, start: str, expected: dict[str, int], tmp_path: Path
) -> None:
    assert printed(uses, start, tmp_path) == expected
