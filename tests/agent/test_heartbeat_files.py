"""Heartbeat files where there is no room for them, and those that killed agents leave."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.agent.worker_group.heartbeat_files import make_heartbeat_file, sweep_heartbeat_files
from elastic_agent.client._cells import HeartbeatFile
from tests.agent.support import COMMAND, clean_environment
from tests.cli.support import command_of_another_user
from tests.names import unique
from tests.small_disk import run_on_small_disk

MAKE = """
import sys
from elastic_agent.client._cells import HeartbeatFile
file = HeartbeatFile.create(sys.argv[1], 1)
print(file.path, flush=True)
sys.stdin.read()
"""

TELLS_ITS_FILE = """
import os, sys
print(os.environ["ELASTIC_AGENT_HEARTBEAT"], flush=True)
sys.exit(os.environ["TORCHELASTIC_RESTART_COUNT"] == "0")
"""
TAKES = """
import os, sys
os.setuid(int(sys.argv[1]))
for path in sys.argv[2:]:
    open(path, "x").close()
"""


@pytest.fixture(autouse=True)
def temporary(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The directory for temporary files."""
    folder = tmp_path / "temporary"
    folder.mkdir()
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    return folder


def test_the_error_names_both_directories_if_neither_can_be_used(tmp_path: Path, temporary: Path) -> None:
    temporary.rmdir()
    nowhere = str(tmp_path / "nowhere")
    with pytest.raises(
        OSError, match=r"in .*nowhere \(No such file.*\) or in \$TMPDIR \(No such file"
    ) as told:
        make_heartbeat_file(2, nowhere)
    assert f"see df {nowhere}" in str(told.value)


def test_workers_start_if_shared_memory_is_full(tmp_path: Path) -> None:
    script = tmp_path / "train.py"
    script.write_text("from elastic_agent import client; client.heartbeat(1); print('trained')")
    agent = [*COMMAND, "--state-dir", str(tmp_path / "state"), "--worker-start", "cold", str(script)]
    fill = ["sh", "-c", 'head -c 4096 /dev/zero >/dev/shm/filler; exec "$0" "$@"']
    done = run_on_small_disk(Path("/dev/shm"), "4k", [*fill, *agent], TMPDIR=str(tmp_path))
    assert done.returncode == 0, done.stderr
    assert "trained" in done.stdout
    assert "heartbeats and notices are disabled" not in done.stderr
    assert (
        f"using {tmp_path} for the heartbeat file because /dev/shm is not usable: No space left"
        in done.stderr
    )
    assert not [*tmp_path.glob("*.beat")]


@pytest.mark.prove
def test_another_user_cannot_block_a_run_by_taking_the_names_of_earlier_files() -> None:
    """Any user may make files there, and only their owner can remove them."""
    if os.geteuid() != 0:
        pytest.skip("only root can act as two other users")
    alice, mallory = 61_001, 65_534
    run_id = unique("known")
    with tempfile.TemporaryDirectory(dir="/var/tmp") as folder:
        os.chown(folder, alice, alice)
        script = Path(folder) / "train.py"
        script.write_text(TELLS_ITS_FILE)
        command = [
            *command_of_another_user(alice),
            *("--state-dir", f"{folder}/state", "--rdzv-id", run_id, "--node-id", "known"),
            *("--worker-start", "cold", "--max-restarts", "1", str(script)),
        ]
        taken: list[str] = []
        options: dict[str, Any] = {"env": clean_environment(), "capture_output": True, "text": True}
        try:
            for _ in range(2):
                done = subprocess.run(command, **options, cwd="/")
                assert done.returncode == 0, done.stderr
                told = done.stdout.split()
                assert len(told) == 2, "one of each generation"
                assert not {*told} & {*taken}
                subprocess.run([sys.executable, "-c", TAKES, str(mallory), *told], check=True, cwd="/")
                taken += told
            assert all(Path(path).exists() for path in taken), "of another user: not swept"
        finally:
            for path in taken:
                Path(path).unlink(missing_ok=True)


def test_files_of_killed_agents_are_removed_and_no_others(tmp_path: Path) -> None:
    makers = [
        subprocess.Popen(
            [sys.executable, "-c", MAKE, str(tmp_path)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        for _ in range(2)
    ]
    paths = []
    for maker in makers:
        assert maker.stdout is not None
        paths.append(maker.stdout.readline().strip())
    killed, alive = makers
    try:
        killed.kill()
        killed.communicate()
        os.mkfifo(tmp_path / "elastic-agent.fifo.beat")
        (tmp_path / "elastic-agent.link.beat").symlink_to(paths[1])
        (tmp_path / "precious.beat").touch()
        before = {file.name for file in tmp_path.iterdir()}
        sweep_heartbeat_files(str(tmp_path / "nowhere"))
        sweep_heartbeat_files(str(tmp_path))
        assert before - {file.name for file in tmp_path.iterdir()} == {Path(paths[0]).name}
    finally:
        alive.kill()
        alive.communicate()


def test_a_new_file_that_another_agent_swept_is_created_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from elastic_agent.client import _cells

    lock, swept = _cells.lock_as_agent, []

    def swept_first(fd: int) -> bool:
        if not swept:
            swept.extend(tmp_path.glob("*.beat"))
            swept[0].unlink()
        return lock(fd)

    monkeypatch.setattr(_cells, "lock_as_agent", swept_first)
    with closing(HeartbeatFile.create(tmp_path, 1)) as file:
        assert [*tmp_path.glob("*.beat")] == [Path(file.path)] != swept
