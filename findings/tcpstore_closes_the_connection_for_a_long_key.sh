#!/usr/bin/env bash
# torch 2.13.0: TCPStore.set with a key of 8,191 characters works; with one of 8,192 the server closes the connection and
# answers nothing. The client raises DistNetworkError "Connection reset by peer", which says nothing of the key, and its
# connection cannot be used any more: other keys fail as well.
# One would guess: no limit is documented, and a limit would be an error of the one call, such as ValueError.
# Source: torch/csrc/distributed/c10d/TCPStoreLibUvBackend.cpp, read_key.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet torch==2.13.0 numpy
"$folder/bin/python" - 2> "$folder/stderr" <<'PYTHON'
from datetime import timedelta

import torch.distributed as dist

server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
client = dist.TCPStore("127.0.0.1", server.port, wait_for_workers=False, timeout=timedelta(seconds=10))


def outcome(key):
    try:
        client.set(key, "value")
        return "works" if client.get(key) == b"value" else "another value"
    except dist.DistNetworkError as error:
        return f"DistNetworkError: {str(error).splitlines()[0]}"


found = [outcome("k" * 8191), outcome("k" * 8192), outcome("short")]
print("keys of 8,191 and 8,192 characters, then a short one:", "; ".join(found))
raise SystemExit(not (found[0] == "works" and all("DistNetworkError" in text for text in found[1:])))
PYTHON
