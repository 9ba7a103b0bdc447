"""A worker that knows nothing of notices and takes a while to save when it gets SIGTERM."""

from __future__ import annotations

import json
import signal
import sys
import time
from pathlib import Path

from notes import note

from elastic_agent import client

FOLDER, SAVE_S = Path(sys.argv[1]), json.loads(sys.argv[2])[client.current().node_id]
"""How long each node's worker takes is one argument: agents of one machine have the same command."""


def save_and_exit(*_: object) -> None:
    note(FOLDER, "saving")
    time.sleep(SAVE_S)
    note(FOLDER, "saved")
    sys.exit(0)


signal.signal(signal.SIGTERM, save_and_exit)
note(FOLDER, "born")
while True:
    signal.pause()
