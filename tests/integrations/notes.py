"""What training scripts of these tests write down. They are run by path, and import this as a module beside them."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path


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
