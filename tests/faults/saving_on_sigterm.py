"""A worker that knows nothing of notices and takes a while to save when it gets SIGTERM."""

from __future__ import annotations

import json
import os
import signal
import sys
import time
from pathlib import Path

import elastic_agent.client as client

FOLDER, SAVE_S = Path(sys.argv[1]), json.loads(sys.argv[2])[client.current().node_id]
"""How long each node's worker takes is one argument: agents of one machine have the same command."""


def note(kind: str) -> None:
    worker = client.current()
    line = {
        "kind": kind,
        "node_id": worker.node_id,
        "worker_id": worker.worker_id,
        "generation": worker.placement.generation,
        "pid": os.getpid(),
        "boottime_s": time.clock_gettime(time.CLOCK_BOOTTIME),
    }
    handle = os.open(FOLDER / "steps.jsonl", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
    os.write(handle, (json.dumps(line) + "\n").encode())
    os.close(handle)


def save_and_exit(*_: object) -> None:
    note("saving")
    time.sleep(SAVE_S)
    note("saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save_and_exit)
note("born")
while True:
    signal.pause()
