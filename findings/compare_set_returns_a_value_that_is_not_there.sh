#!/usr/bin/env bash
# torch 2.13.0: Store.compare_set(key, expected, desired) of a key that does not exist returns `expected`, although the
# store holds nothing and nothing was set; TCPStore and HashStore, and FileStore too. What is returned for a key that
# does exist is its value after the call.
# One would guess: a compare-and-set returns what is there, so an answer equal to `expected` means that the key has this
# value. A client that renews a lock so, expecting its own name, is told its own name after the lock has been deleted.
# Source: torch/csrc/distributed/c10d/TCPStoreBackend.cpp and TCPStoreLibUvBackend.cpp ('we are "lying" to the caller in case
# the key does not exist'), HashStore.cpp, FileStore.cpp. The documentation says only when the value is set.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - "$folder/file" 2> "$folder/stderr" <<'PYTHON'
import sys

import torch.distributed as dist

stores = [
    dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False),
    dist.HashStore(),
    dist.FileStore(sys.argv[1], 1),
]
found = []
for store in stores:
    answer = store.compare_set("owner", "me", "you")
    found.append((answer, store.check(["owner"])))
    print(f"{type(store).__name__}: compare_set of a missing key, expecting 'me': {answer}; the key exists: {found[-1][1]}")
raise SystemExit(found != [(b"me", False)] * 3)
PYTHON
