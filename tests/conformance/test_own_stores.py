"""A script may host stores of its own beside the agent's, as under plain Python."""

from __future__ import annotations

from collections import Counter

import pytest

from tests.cli.support import elastic_agent
from tests.ports import free_port

from .launchers import PATIENCE_S, SCRIPTS


def printed(uses: str, start: str) -> dict[str, int]:
    done = elastic_agent(
        *("--nproc-per-node", "2", "--worker-start", start, "--max-restarts", "0"),
        *(str(SCRIPTS / "own_stores.py"), uses, str(free_port())),
        patience_s=PATIENCE_S,
    )
    assert done.returncode == 0, done.stderr
    return Counter(done.stdout.splitlines())


@pytest.mark.parametrize("start", ["warm", "cold"])
def test_a_script_and_its_children_host_stores_of_their_own(start: str) -> None:
    assert printed("own", start) == {
        "agent's store 2": 2,
        "own store by address 2": 2,
        "own store of a spawn child 1": 1,
        "own store of a forkserver child 1": 1,
    }


@pytest.mark.parametrize(
    ("uses", "expected"),
    [("address", {"agent's store by address 2": 2}), ("children", {"agent's store in children 4": 4})],
)
def test_whoever_connects_to_the_agents_store_still_does(uses: str, expected: dict[str, int]) -> None:
    assert printed(uses, "cold") == expected
