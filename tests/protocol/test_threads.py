"""Records are read by several threads of an agent at once, from its first moment on."""

from __future__ import annotations

import subprocess
import sys

import pytest

MANY_THREADS_READ_THEIR_FIRST_PLAN = """
import sys, threading
from elastic_agent.protocol.codec import decode, encode
from elastic_agent.protocol.records import RECORD_VERSION, Address, Phase, Plan, Policy, Seat, World

seats = tuple(Seat(f"n{i}", f"i{i}", "10.0.0.1", 1, i) for i in range(50))
world = World(1, seats, Address("10.0.0.1", 4000), "n0")
data = encode(Plan(RECORD_VERSION, 1, Phase.RUNNING, 1, "because", Policy(), world, seats))
gate = threading.Barrier(24)
read = []

def work():
    gate.wait()
    read.append(decode(Plan, data))

sys.setswitchinterval(1e-6)
threads = [threading.Thread(target=work) for _ in range(24)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
assert len(read) == 24 and all(plan.world == world for plan in read)
"""


@pytest.mark.parametrize("attempt", range(5))
def test_many_threads_that_read_their_first_record_at_once_do_not_crash(attempt: int) -> None:
    """msgspec 0.22 crashed in two of three such processes where it had to learn the types meanwhile."""
    done = subprocess.run(
        [sys.executable, "-c", MANY_THREADS_READ_THEIR_FIRST_PLAN],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"ended with {done.returncode}: {done.stderr}"
