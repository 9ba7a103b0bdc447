"""The two copies in the agent's memory: complete ones only, of one training only, and only where there is room."""

from __future__ import annotations

import mmap
import os
import signal
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from elastic_agent import linux
from elastic_agent.agent.worker_group.factory import StateMemory
from elastic_agent.survive._memory import Memory, available_bytes
from elastic_agent.survive._packing import pack, unpack

MINE, ANOTHER = b"m" * 32, b"a" * 32


@pytest.fixture
def paths() -> Iterator[list[str]]:
    """The files of the only worker of a node."""
    held = StateMemory(1)
    try:
        yield held.paths[0].split(":")
    finally:
        held.close()


def write(memory: Memory, step: int) -> None:
    memory.write(step, pack({"step": step, "values": torch.full((1000,), float(step))}))


def newest(memory: Memory) -> int | None:
    """The step of the newest copy, whose values must be those of that step."""
    found = memory.newest()
    if found is None:
        return None
    tree = unpack(memory.view(found), found.skeleton_size)
    assert tree["step"] == found.step
    assert torch.equal(tree["values"], torch.full((1000,), float(found.step)))
    return found.step


def test_the_newest_copy_is_read_by_the_next_process(paths: list[str]) -> None:
    for step in (1, 2, 3):
        write(Memory(paths, MINE, 1), step)
        assert newest(Memory(paths, MINE, 1)) == step


def test_a_step_that_was_taken_back_is_newer_than_those_before(paths: list[str]) -> None:
    memory = Memory(paths, MINE, 1)
    for step in (90, 100, 50):
        write(memory, step)
    assert newest(memory) == 50


def test_a_copy_that_was_not_completed_is_not_used(paths: list[str]) -> None:
    memory = Memory(paths, MINE, 1)
    for step in (1, 2):
        write(memory, step)
    packed = pack({"step": 3, "values": torch.full((1000,), 3.0)})
    if (pid := os.fork()) == 0:
        with memory.replacing(3, packed.size, len(packed.skeleton)) as area:
            area[: packed.size // 2] = 7
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    assert newest(Memory(paths, MINE, 1)) == 2
    write(Memory(paths, MINE, 1), 4)
    assert newest(Memory(paths, MINE, 1)) == 4


@pytest.mark.parametrize("length", [0, 10, mmap.PAGESIZE, mmap.PAGESIZE + 1000])
def test_a_file_that_is_too_short_is_not_used(paths: list[str], length: int) -> None:
    write(Memory(paths, MINE, 1), 1)
    for path in paths:
        os.truncate(path, length)
    assert Memory(paths, MINE, 1).newest() is None


def test_larger_states_fit_too(paths: list[str]) -> None:
    memory = Memory(paths, MINE, 1)
    write(memory, 1)
    for size in (10, 100_000, 1_000_000):
        memory.write(size, pack({"values": torch.arange(size)}))
        found = memory.newest()
        assert found is not None
        assert torch.equal(unpack(memory.view(found), found.skeleton_size)["values"], torch.arange(size))


def test_another_training_does_not_use_what_is_there_and_clears_it(paths: list[str]) -> None:
    earlier, later = Memory(paths, ANOTHER, 1), Memory(paths, MINE, 1)
    write(earlier, 1)
    assert later.newest() is None
    assert later.belongs_to_another()
    with pytest.raises(OSError, match="another training of this worker uses the memory"):
        write(later, 2)
    later.clear()
    assert sum(os.stat(path).st_blocks for path in paths) == 0
    assert not later.belongs_to_another()
    write(later, 2)
    assert newest(later) == 2
    assert earlier.newest() is None


def test_memory_that_is_too_small_for_two_copies_is_not_taken(paths: list[str]) -> None:
    machine = available_bytes()
    memory = Memory(paths, MINE, workers=machine // 1000)
    with pytest.raises(
        MemoryError, match=r"two copies of each worker's state need \d+ MB more, \d+ MB are free"
    ):
        write(memory, 1)
    assert sum(os.stat(path).st_blocks for path in paths) <= 8  # a page
    assert memory.newest() is None


@pytest.mark.parametrize(
    ("limits", "expected"),
    [
        ({}, 8_000_000 * 1024),
        ({"": "max"}, 8_000_000 * 1024),
        ({"": "3000000"}, 3_000_000 - 1_000_000 + 200_000 + 100_000),
        ({"": "max", "..": "2500000"}, 2_500_000 - 1_000_000 + 200_000 + 100_000),
        ({"": "3000000", "..": "9999999999999"}, 3_000_000 - 1_000_000 + 200_000 + 100_000),
    ],
)
def test_the_smallest_limit_counts_without_what_the_kernel_gives_back(
    tmp_path: Path, limits: dict[str, str], expected: int
) -> None:
    (tmp_path / "proc").mkdir()
    (tmp_path / "proc/meminfo").write_text("MemTotal: 9000000 kB\nMemAvailable: 8000000 kB\n")
    own = tmp_path / "sys/fs/cgroup" / linux.cgroups().get("", "/").lstrip("/") / "job"
    for name, limit in limits.items():
        folder = own.parent / name
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "memory.max").write_text(limit + "\n")
        (folder / "memory.current").write_text("1000000\n")
        (folder / "memory.stat").write_text("anon 700000\ninactive_file 200000\nactive_file 100000\n")
    assert available_bytes(str(tmp_path)) == expected


def test_the_agent_gives_memory_back(paths: list[str]) -> None:
    held = StateMemory(2)
    assert len({path for pair in held.paths for path in pair.split(":")}) == 4
    others = [path for pair in held.paths for path in pair.split(":")]
    write(Memory(others[:2], MINE, 1), 1)
    held.close()
    held.close()
    assert not [path for path in others if os.path.exists(path)]


# -- what is stored ---------------------------------------------------------------------------------


def _with_metadata() -> Any:
    state = torch.nn.BatchNorm1d(3).state_dict()
    assert state._metadata  # type: ignore[attr-defined]
    return state


@pytest.mark.parametrize(
    "make",
    [
        lambda: {1: (1, 2.5, None, True), "list": [b"x", "text", {"deep": torch.arange(3)}]},
        lambda: torch.tensor(1.5, dtype=torch.bfloat16),
        lambda: torch.tensor([True, False, True]),
        lambda: torch.empty(0, 5),
        lambda: torch.arange(12.0).view(3, 4).t()[1:, ::2],
        lambda: torch.arange(24.0).view(1, 2, 3, 4).to(memory_format=torch.channels_last),
        lambda: torch.ones(1).expand(5),
        lambda: torch.tensor([1 + 2j], dtype=torch.complex128),
        lambda: torch.nn.Parameter(torch.ones(2)),
        lambda: [torch.ones(3, dtype=torch.int8), torch.full((5,), 2.0, dtype=torch.float64)],
        lambda: Counter({30: 1, 80: 2}),
        lambda: OrderedDict(b=1, a=torch.zeros(1)),
        _with_metadata,
        lambda: torch.Size([1, 2]),
    ],
)
def test_what_is_stored_is_read_as_it_was(make: Callable[[], Any]) -> None:
    tree = make()
    packed = pack({"before": torch.ones(1), "part": tree, "after": torch.ones(1)})
    memory = torch.full((packed.size,), 255, dtype=torch.uint8)
    packed.write_to(memory)
    read = unpack(memory, len(packed.skeleton))
    same(read["part"], tree)
    same(read["after"], torch.ones(1))


def same(read: Any, tree: Any) -> None:
    """Assert that two trees are equal, with their types."""
    if isinstance(tree, torch.Tensor):
        assert read.dtype == tree.dtype
        assert read.shape == tree.shape
        if torch.empty_like(tree).stride() == tree.stride():  # others have no memory of their own
            assert read.stride() == tree.stride()
        assert torch.equal(read, tree)
        return
    assert type(read) is type(tree)
    assert getattr(read, "_metadata", None) == getattr(tree, "_metadata", None)
    if isinstance(tree, dict):
        assert list(read) == list(tree)
        for key in tree:
            same(read[key], tree[key])
    elif isinstance(tree, list | tuple):
        assert len(read) == len(tree)
        for left, right in zip(read, tree, strict=True):
            same(left, right)
    else:
        assert read == tree
