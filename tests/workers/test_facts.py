"""The facts about a machine that are taken when a worker fails."""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.linux import cgroups
from elastic_agent.printable import size_text
from elastic_agent.workers import facts
from elastic_agent.workers.failure import describe
from tests.small_disk import run_on_small_disk

MEMORY_CGROUP = Path("/sys/fs/cgroup/memory")

EATS_MEMORY = """
import os, signal, sys
open(sys.argv[1] + "/cgroup.procs", "w").write(str(os.getpid()))
from elastic_agent.workers import facts
before = facts.baseline()
pid = os.fork()
if not pid:
    kept = []
    while True:
        kept.append(b"x" * (16 << 20))
_, status = os.waitpid(pid, 0)
found = facts.machine_facts(before, [pid], [])
log = found.get("kernel_log", "")
print(os.waitstatus_to_exitcode(status), found["oom_kills"], found["memory_limit"], log, sep="|")
"""


@pytest.fixture
def small_cgroup() -> Iterator[Path]:
    """Make a memory cgroup of 200 MB."""
    own = cgroups().get("memory")
    if own is None:
        pytest.skip("needs a memory controller of cgroup version 1")
    folder = Path(f"{MEMORY_CGROUP}{own}/elastic-agent-test-{os.getpid()}")
    try:
        folder.mkdir()
    except OSError as error:
        pytest.skip(f"needs permission to make a cgroup: {error}")
    (folder / "memory.limit_in_bytes").write_text("200000000")
    yield folder
    folder.rmdir()


@pytest.mark.prove
def test_a_process_that_the_kernel_killed_for_its_memory_is_counted(small_cgroup: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", EATS_MEMORY, str(small_cgroup)],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )
    returncode, kills, limit, log = done.stdout.strip().split("|")
    assert (int(returncode), kills, limit) == (-signal.SIGKILL, "1", "200 MB")
    assert "Killed process" in log or not os.access("/dev/kmsg", os.R_OK)


def test_nothing_is_counted_if_nothing_was_killed_and_limits_are_told() -> None:
    found = facts.machine_facts(facts.baseline(), [], [])
    assert found.get("oom_kills", "0") == "0"
    assert "available" in found["memory_available"]
    assert str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in found["open_files"]
    assert {"memlock_limit", "process_limit"} <= found.keys()


FILLS_DISK = """
import os, sys
from elastic_agent.workers import facts
try:
    with open(sys.argv[1] + "/ckpt", "wb", buffering=0) as file:
        while file.write(bytes(4096)):
            pass
except OSError:
    pass
print(facts.machine_facts(facts.baseline(), [], [sys.argv[1]])["disk_full"])
"""


def test_a_full_disk_is_found(tmp_path: Path) -> None:
    done = run_on_small_disk(tmp_path, "64k", [sys.executable, "-c", FILLS_DISK, str(tmp_path)])
    assert f"{tmp_path}: 0 B of 65.5 kB free" in done.stdout


@pytest.mark.parametrize(
    ("number", "text"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (2 * 10**9, "2 GB"), (123456789, "123 MB"), (10**18, "1 EB")],
)  # fmt: skip
def test_sizes_are_shown_with_three_digits(number: int, text: str) -> None:
    assert size_text(number) == text


def test_a_fact_that_cannot_be_found_out_takes_no_other_along() -> None:
    """However a look fails: without a file, with content that cannot be read, or in a way that nobody expected."""

    def fails(error: Exception) -> facts.Look:
        def look() -> str:
            raise error

        return look

    errors = [
        PermissionError(13, "Permission denied"),
        ValueError("not a number"),
        RuntimeError("unexpected"),
    ]
    found: dict[str, str] = {}
    looks = {"first": lambda: "1", **{str(number): fails(error) for number, error in enumerate(errors)}}
    facts.gather({**looks, "nothing": lambda: "", "last": lambda: "/data/\udcff"}, found)
    assert found == {"first": "1", "last": "/data/?"}


LIMITED = """
import resource, sys
from elastic_agent.workers import facts
which = {"-v": resource.RLIMIT_AS, "-d": resource.RLIMIT_DATA}[sys.argv[1]]
resource.setrlimit(which, (8 * 10**9, 8 * 10**9))
print(facts.worker_facts(facts.baseline())["address_space"])
"""


@pytest.mark.parametrize("option", ["-v", "-d"])
def test_a_limit_of_a_process_is_named_where_memory_is_missing(option: str) -> None:
    done = subprocess.run([sys.executable, "-c", LIMITED, option], capture_output=True, text=True, check=True)
    limit = done.stdout.strip()
    assert limit == f"ulimit {option}: 8 GB"
    for error in (
        "MemoryError",
        "RuntimeError: can't start new thread",
        "RuntimeError: Resource temporarily unavailable",
    ):
        known = {"address_space": limit, "memory_available": "19.5 GB of 25.3 GB available"}
        stderr = f'Traceback (most recent call last):\n  File "train.py", line 1, in <module>\n{error}\n'
        found = describe(0, 1, "", stderr, facts=known).summary("n1")
        assert found.endswith(f"({limit})")
        assert "25.3 GB" not in found


@pytest.mark.parametrize("change", ["stays", "gone", "replaced by another"])
def test_what_became_of_the_working_directory_is_found(
    change: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "exp"
    folder.mkdir()
    monkeypatch.chdir(folder)
    before = facts.baseline(facts.Started(str(folder)))
    if change != "stays":
        folder.rmdir()
    if change == "replaced by another":
        folder.mkdir()
    found = facts.machine_facts(before, [], [])
    assert found["open_files"]
    assert found["memory_available"]
    if change == "stays":
        assert "working_folder" not in found
    else:
        assert change in found["working_folder"]
        assert str(folder) in found["working_folder"]


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_an_active_environment_that_is_not_the_one_of_the_workers_is_named(
    variable: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").symlink_to(sys.executable)
    for name in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    agents = facts.baseline(facts.Started(python=sys.executable))
    assert "other_environment" not in facts.worker_facts(agents)
    monkeypatch.setenv(variable, str(tmp_path))
    assert "other_environment" not in facts.worker_facts(agents), "its Python is not the first on PATH"
    monkeypatch.setenv("PATH", f"{tmp_path}/bin:{os.environ['PATH']}")
    found = facts.worker_facts(agents)["other_environment"]
    assert str(tmp_path) in found
    assert sys.prefix in found
    for chosen in (str(tmp_path / "bin" / "python"), ""):
        assert "other_environment" not in facts.worker_facts(facts.baseline(facts.Started(python=chosen)))
    monkeypatch.setenv(variable, sys.prefix)
    monkeypatch.setenv("PATH", f"{sys.prefix}/bin:{os.environ['PATH']}")
    assert "other_environment" not in facts.worker_facts(agents)
