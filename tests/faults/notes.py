"""What workers of these tests write down. Their scripts are run by path, and import this as a module beside them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from elastic_agent import client


def note(folder: Path, kind: str, **more: object) -> None:
    """Append a line about this worker to ``steps.jsonl``, in one write: many processes share the file."""
    worker = client.current()
    place = worker.placement
    line = {
        "kind": kind,
        "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "run_id": worker.run_id,
        "node_id": worker.node_id,
        "worker_id": worker.worker_id,
        "generation": place.generation,
        "rank": place.rank,
        "local_rank": place.local_rank,
        "node_rank": place.node_rank,
        "world_size": place.world_size,
        "restarts": place.restarts,
        "pid": os.getpid(),
        **more,
    }
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)
