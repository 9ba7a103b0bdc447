#!/usr/bin/env bash
# torch 2.13.0: TCPStore.wait(keys) returns, without an error, although its key was never set, as soon as another client
# calls compare_set on that key with an expected value that is not there. The key does not exist before or after. Two
# clients that wait for a key, and look with compare_set whether it is there, so wake each other for ever.
# One would guess: wait returns when all keys are there ("Waits for each key in keys to be added to the store"), and a
# compare_set that stores nothing is no addition; what fails to change the store wakes nobody.
# Source: torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp: the handler of COMPARE_SET wakes the clients that wait for
# the key whatever its outcome is. docs: Store.wait in "Distributed communication package".
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - 2> "$folder/stderr" <<'PYTHON'
import threading
from datetime import timedelta

import torch.distributed as dist

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
waiting, looking = (dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False) for _ in range(2))
returned = threading.Event()


def wait() -> None:
    waiting.wait(["key"], timedelta(seconds=60))
    returned.set()


threading.Thread(target=wait, daemon=True).start()
tries = 0
while not returned.wait(0.1) and tries < 100:  # the first may come before the wait has begun
    tries += 1
    looking.compare_set("key", "expected", "desired")
exists = looking.check(["key"])
print(f"wait for a key, while another client's compare_set of it fails: returned {returned.is_set()}; the key exists: {exists}")
raise SystemExit((returned.is_set(), exists) != (True, False))
PYTHON
