"""The heartbeat file as its agent makes and reads it."""

from __future__ import annotations

import os
import stat
from contextlib import closing
from pathlib import Path

import pytest

from elastic_agent.client._cells import SLOT_BYTES, HeartbeatFile, claim_cell


def test_file_is_small_complete_and_for_its_owner_only(tmp_path: Path) -> None:
    before = os.umask(0)
    try:
        file = HeartbeatFile.create(tmp_path, 8)
    finally:
        os.umask(before)
    with closing(file):
        path = Path(file.path)
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert path.read_bytes() == bytes(8 * SLOT_BYTES)
        assert path.stat().st_blocks > 0, "its space is not reserved: a beat on a full disk would be a SIGBUS"
        assert [file.read(slot) for slot in range(file.slots)] == [(0, 0)] * 8
        assert [*tmp_path.iterdir()] == [path]


def test_each_cell_is_at_its_documented_offset(tmp_path: Path) -> None:
    with closing(HeartbeatFile.create(tmp_path, 2)) as file:
        words = claim_cell(file.path, 1)
        assert words is not None
        words[1] = -5
        words[0] = 3
        assert file.read(1) == (3, -5)
        raw = Path(file.path).read_bytes()
        assert raw[:128] == bytes(128)
        assert int.from_bytes(raw[128:136], "little") == 3
        assert int.from_bytes(raw[136:144], "little", signed=True) == -5
        assert raw[144:] == bytes(2 * SLOT_BYTES - 144)


def test_a_failed_creation_leaves_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(FileNotFoundError):
        HeartbeatFile.create(tmp_path / "nowhere", 1)
    monkeypatch.setattr(os, "write", lambda fd, data: len(data) - 1)  # as on a disk with less room
    with pytest.raises(OSError, match="No space left on device"):
        HeartbeatFile.create(tmp_path, 1)
    assert not [*tmp_path.iterdir()]
