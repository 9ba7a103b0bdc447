"""The agents of one machine share out its node ids, and take the same ones again after they were killed."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest

from elastic_agent.agent.identity import IdentityError, host_name, take_seat

HOLDER = """
import sys
from pathlib import Path
from elastic_agent.agent.identity import IdentityError, take_seat
try:
    seat = take_seat(Path(sys.argv[1]), sys.argv[2] if len(sys.argv) > 2 else None)
except IdentityError as error:
    print("refused:", error, flush=True)
else:
    print(seat.node_id, seat.predecessor, flush=True)
    seat.record(sys.argv[3] if len(sys.argv) > 3 else "life", [])
    print("written down", flush=True)
    sys.stdin.read()
"""


@contextmanager
def holders(folder: Path, count: int, *words: str) -> Iterator[list[str]]:
    """Processes that take a seat at the same time, and what each says of it; killed in the end."""
    with ExitStack() as stack:
        processes = [
            stack.enter_context(
                subprocess.Popen(
                    [sys.executable, "-c", HOLDER, str(folder), *words],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
            )
            for _ in range(count)
        ]
        for process in processes:
            stack.callback(process.kill)
        said = []
        for process in processes:
            assert process.stdout is not None
            line = process.stdout.readline().strip()
            if not line.startswith("refused"):
                assert process.stdout.readline() == "written down\n"
            said.append(line)
        yield said


def test_agents_get_ids_of_their_own_and_the_same_ones_after_all_were_killed(tmp_path: Path) -> None:
    base = host_name()
    ids = [base, f"{base}-2", f"{base}-3"]
    with holders(tmp_path, 3) as said:
        assert sorted(said) == [f"{one} None" for one in ids]
    with holders(tmp_path, 3) as said:
        assert sorted(said) == [f"{one} life" for one in ids], (
            "the predecessors had no process that still lives"
        )
    with holders(tmp_path, 1) as said:
        assert said == [f"{base} life"], "the first free one"


def test_of_two_agents_with_one_explicit_id_one_is_refused_in_one_line(tmp_path: Path) -> None:
    with holders(tmp_path, 2, "n1") as said:
        held, refused = sorted(said)
        assert held == "n1 None"
        assert refused.startswith("refused: node id n1 is held by another agent on this machine")
        with pytest.raises(IdentityError):
            take_seat(tmp_path, "n1")
        take_seat(tmp_path, "n2").release()
    take_seat(tmp_path, "n1").release()


def test_runs_do_not_share_their_seats(tmp_path: Path) -> None:
    with holders(tmp_path / "one", 1) as first, holders(tmp_path / "other", 1) as second:
        assert first == second == [f"{host_name()} None"]
