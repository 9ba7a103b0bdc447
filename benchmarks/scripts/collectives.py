"""A loop of all_reduce over gloo that writes down when it got where: torch alone, no training.

BENCH_PAUSE_S is the pause between two rounds.
"""

import os
import time

from events import STEADY_ROUNDS, Rounds, tell


def report_progress() -> None:
    """As training does: workers that are killed one after the other before any progress are restarted with pauses."""
    from elastic_agent import client

    client.heartbeat()


import torch  # noqa: E402
import torch.distributed as dist  # noqa: E402

tell("imported")
dist.init_process_group("gloo")
tell("process_group")

rounds = Rounds()
rounds.meet()
pause_s = float(os.environ.get("BENCH_PAUSE_S", "0.01"))
while True:
    dist.all_reduce(torch.ones(256))
    rounds.done()
    if rounds.number == STEADY_ROUNDS:
        report_progress()
    time.sleep(pause_s)
