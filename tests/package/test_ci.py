"""The check of a whole clone, however it is started; with a stand-in for make."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

RUN = Path(__file__).parents[2] / ".ci" / "run"
MAKE = """\
#!/bin/sh
streams=$(for fd in 0 1 2; do readlink /proc/$$/fd/$fd || echo closed; done)
echo "$streams" >>"$SEEN"
"""


@pytest.mark.parametrize("closed", ["", "2>&-", ">&-", ">&- 2>&-", "<&-"])
def test_ci_steps_have_all_standard_streams(closed: str, tmp_path: Path) -> None:
    make, seen = tmp_path / "make", tmp_path / "seen"
    make.write_text(MAKE)
    make.chmod(0o755)
    for name in ("etcd", "etcdctl"):
        (tmp_path / name).symlink_to(make)
    env = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}", "SEEN": str(seen)}
    done = subprocess.run(
        ["bash", "-c", f"bash '{RUN}' {closed}"], env=env, capture_output=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr.decode(errors="replace")
    streams = seen.read_text().split("\n")[:-1]
    assert len(streams) == 9, "make setup, make lint and make test"
    assert "closed" not in streams
    for stream in streams:
        assert stream == "/dev/null" or stream.startswith(("pipe:", "/dev/pts/")), f"{stream} took its place"
