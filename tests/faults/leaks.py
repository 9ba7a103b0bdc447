"""Makes secrets of runs, and looks for them wherever other processes could find them."""

from __future__ import annotations

import json
from collections.abc import Collection
from contextlib import suppress
from pathlib import Path

from elastic_agent import linux

from .cluster import Cluster


def secret_file(folder: Path, name: str) -> str:
    """Make a file with a secret that no other name has."""
    file = folder / name
    file.touch(mode=0o600)
    file.write_text(f"{name}: 0123456789abcdef")
    return str(file)


def is_in_memory_of(pid: int, word: bytes) -> bool:
    """Return whether a core dump of this process would have it."""
    with Path(f"/proc/{pid}/mem").open("rb", buffering=0) as memory:
        for line in Path(f"/proc/{pid}/maps").read_text().splitlines():
            place, access, *_ = line.split()
            if access.startswith("rw"):
                start, end = (int(part, 16) for part in place.split("-"))
                memory.seek(start)
                if word in memory.read(end - start):
                    return True
    return False


def check_no_leak(cluster: Cluster, folder: Path, secret: str, variable: str) -> Collection[str]:
    """Run an agent with ``--preload looks_around`` and the secret in this variable; returns its worker's variables.

    Neither the workers nor preloaded modules have the secret, nor any process of the agent in its environment or, but
    for the agent itself, in its memory; the log does not show it.
    """
    shown = cluster.folder / "environment.json"
    preloaded = folder / "environment-of-the-spawner.json"
    (folder / "looks_around.py").write_text(
        f"import json, os\njson.dump(dict(os.environ), open({str(preloaded)!r}, 'w'))\n"
    )
    script = folder / "show.py"
    script.write_text(
        f"import json, os, time\njson.dump(dict(os.environ), open({str(shown)!r} + '~', 'w'))\n"
        f"os.rename({str(shown)!r} + '~', {str(shown)!r})\n"
        f"while os.path.exists({str(shown)!r}):\n    time.sleep(0.01)\n"
    )
    agent = cluster.start("a", script=script, **{variable: secret})
    cluster.wait("the script", lambda: shown.exists() or None)
    processes = [process.pid for process in linux.descendants(agent.pid)]
    assert len(processes) >= 3, "the guard, its spawner, a worker"
    for pid in (agent.pid, *processes):
        with suppress(FileNotFoundError, ProcessLookupError):  # it has ended
            assert secret.encode() not in Path(f"/proc/{pid}/environ").read_bytes(), f"process {pid}"
            assert pid == agent.pid or not is_in_memory_of(pid, secret.encode()), f"process {pid}"
    environment = json.loads(shown.read_text())
    shown.unlink()
    assert cluster.wait_end() == {"a": 0}, cluster.story()
    assert secret not in environment.values()
    assert secret not in json.loads(preloaded.read_text()).values()
    assert secret not in agent.said()
    return list(environment)
