"""What training scripts of these tests write down. They are run by path, and import this as a module beside them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

WORKER = {
    "ELASTIC_AGENT_RUN_ID": "trainings",
    "ELASTIC_AGENT_NODE_ID": "n",
    "ELASTIC_AGENT_WORKER_ID": "n/0",
    "ELASTIC_AGENT_SLOT": "0",
    "ELASTIC_AGENT_INCARNATION": "x",
    "ELASTIC_AGENT_RESTARTS": "0",
    "ELASTIC_AGENT_GENERATION": "1",
    "ELASTIC_AGENT_FIRST_GENERATION": "1",
    "TORCHELASTIC_RUN_ID": "trainings",
    "TORCHELASTIC_RESTART_COUNT": "0",
}
"""What an agent gives its only worker, and the world of that worker:"""
ONE_WORKER = {
    "RANK": "0",
    "WORLD_SIZE": "1",
    "LOCAL_RANK": "0",
    "LOCAL_WORLD_SIZE": "1",
    "GROUP_RANK": "0",
    "GROUP_WORLD_SIZE": "1",
}


def note(folder: Path, kind: str, **more: object) -> None:
    """Append one line to ``steps.jsonl``, in one write: several workers share the file."""
    line = {
        "kind": kind,
        "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
        "node_id": os.environ["ELASTIC_AGENT_NODE_ID"],
        "worker_id": os.environ["ELASTIC_AGENT_WORKER_ID"],
        "generation": int(os.environ["ELASTIC_AGENT_GENERATION"]),
        "restarts": int(os.environ["ELASTIC_AGENT_RESTARTS"]),
        "pid": os.getpid(),
        **more,
    }
    handle = os.open(folder / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)
