"""Which process of this machine listens on a port."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path

from elastic_agent.linux import open_files, process_ids, process_name

_LISTEN = "0A"


def holder_of(port: int) -> str:
    """Return which process listens on a TCP port of this machine, as "program (pid N)"; empty if none is visible."""
    inodes = {f"socket:[{inode}]" for inode in _listening_inodes(port)}
    for pid in process_ids() if inodes else ():
        with contextlib.suppress(OSError):
            if inodes.intersection(open_files(pid)):
                return f"{process_name(pid)} (pid {pid})"
    return "a process of another user or container" if inodes else ""


def _listening_inodes(port: int) -> Iterator[str]:
    wanted = f":{port:04X}"
    for table in ("/proc/self/net/tcp", "/proc/self/net/tcp6"):
        with contextlib.suppress(OSError):
            for line in Path(table).read_text(encoding="ascii").splitlines()[1:]:
                fields = line.split()
                if fields[1].endswith(wanted) and fields[3] == _LISTEN:
                    yield fields[9]
