"""The files of a failed worker, as part of its end."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest

from elastic_agent.workers.end import WorkerEnd
from elastic_agent.workers.guard.line import TAIL_BYTES

FAILED = WorkerEnd(1, 0, 4711, 1, 100.0)


def test_the_error_file_and_the_end_of_stderr_are_read(tmp_path: Path) -> None:
    error, stderr = tmp_path / "error.json", tmp_path / "stderr.log"
    error.write_bytes(b'{"message": "caf\xe9"}')
    stderr.write_text("x" * 100_000 + "the end\n")
    end = FAILED.with_files(str(error), {"stderr": str(stderr), "stdout": str(tmp_path / "missing.log")})
    assert end.error_file == '{"message": "caf\N{REPLACEMENT CHARACTER}"}'
    assert end.stderr_tail == "x" * (TAIL_BYTES - 8) + "the end\n"


def make_fifo(path: Path) -> None:
    os.mkfifo(path)


def make_zeros(path: Path) -> None:
    path.symlink_to("/dev/zero")


@pytest.mark.parametrize("make", [make_fifo, Path.mkdir, make_zeros, lambda path: None])
def test_anything_but_a_file_is_empty_and_does_not_block(tmp_path: Path, make: object) -> None:
    assert callable(make)
    for name in ("error.json", "stderr.log"):
        make(tmp_path / name)
    end = FAILED.with_files(str(tmp_path / "error.json"), {"stderr": str(tmp_path / "stderr.log")})
    assert end == replace(FAILED, is_read=True)
