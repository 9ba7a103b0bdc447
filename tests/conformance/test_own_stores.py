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
def test_a_script_and_its_children_host_stores_of_their_own_and_connect_to_the_agents(tmp_path: Path) -> None:
    assert printed("children", "warm", tmp_path) == {**OWN, "agent's store in a child 2": 2}


@pytest.mark.prove
@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_script_that_uses_the_agents_store_hosts_others(start: str, tmp_path: Path) -> None:
    assert printed("own", start, tmp_path) == {**OWN, "agent's store 2": 2}


@pytest.mark.prove
def test_a_script_connects_to_the_agents_store_by_its_address(tmp_path: Path) -> None:
    assert printed("address", "cold", tmp_path) == {"agent's store by address 2": 2}
