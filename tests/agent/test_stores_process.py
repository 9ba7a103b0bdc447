"""The process that serves an agent's stores, which has torch so that the agent needs none."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from elastic_agent.linux import descendants, mapped_files, process_ids
from elastic_agent.testing.processes import freeze
from tests.agent.support import elastic_agent, started
from tests.names import unique
from tests.ports import free_port
from tests.waiting import wait_for

SCRIPT = """
import os, pathlib, sys, time
folder = pathlib.Path(sys.argv[1])
print(os.environ["TORCHELASTIC_RESTART_COUNT"], file=(folder / "starts").open("a"))
while not (folder / "may-end").exists():
    time.sleep(0.02)
"""


class Run:
    """A run on this machine whose worker ends when it is told to."""

    def __init__(self, folder: Path, agent: subprocess.Popen[str]) -> None:
        self.folder, self.agent = folder, agent

    @property
    def starts(self) -> list[str]:
        """The restart count at each start of the worker."""
        file = self.folder / "starts"
        return file.read_text().split() if file.exists() else []

    def stores_process(self) -> int:
        """The process that serves the stores: it has torch, and is no worker's."""
        return next(pid for pid in pids_below(self.agent.pid) if serves_stores(pid))


def pids_below(pid: int) -> list[int]:
    return [process.pid for process in descendants(pid)]


def serves_stores(pid: int) -> bool:
    return Path(f"/proc/{pid}/comm").read_text() == "elastic-stores\n"


def has_torch(pid: int) -> bool:
    return any(name.startswith("libtorch") for name in mapped_files(pid))


def has_all_of_torch(pid: int) -> bool:
    """Return whether a library is loaded that torch loads for its Python modules."""
    return "libtorch_global_deps.so" in mapped_files(pid)


@contextmanager
def running(folder: Path, *options: str) -> Iterator[Run]:
    (folder / "train.py").write_text(SCRIPT)
    argv = ["--rdzv-endpoint", f"127.0.0.1:{free_port()}", "--state-dir", str(folder / "state")]
    argv += ["--rdzv-id", unique("run"), *options, str(folder)]
    with started(*argv, cwd=folder, stdout=None, stderr=None) as agent:
        run = Run(folder, agent.process)
        wait_for("the worker to start", lambda: run.starts)
        yield run


WARM = ("--worker-start", "warm")
KINDS = {
    "warm": (*WARM, "train.py"),
    "cold": ("train.py",),
    "program": ("--no-python", sys.executable, "train.py"),
}


@pytest.mark.parametrize("options", KINDS.values(), ids=KINDS.keys())
def test_the_agent_has_no_torch_and_takes_the_process_that_has_it_along(
    tmp_path: Path, options: tuple[str, ...]
) -> None:
    with running(tmp_path, *options) as run:
        stores = run.stores_process()
        assert has_torch(stores)
        assert not has_torch(run.agent.pid)
        # Nothing can be forked from a spawner: the process loads the compiled code of torch only.
        assert has_all_of_torch(stores) is ("warm" in options)
        run.agent.kill()
        wait_for("the process of the stores to end", lambda: stores not in process_ids())


def kill_it(agent: int, stores: int) -> None:
    os.kill(stores, signal.SIGKILL)


def suspend_the_agent(agent: int, stores: int) -> None:
    """Otherwise other nodes would keep their leases at a store for which no coordinator decides any more."""
    freeze(agent)
    wait_for("the process of the stores to end", lambda: stores not in process_ids())
    os.kill(agent, signal.SIGCONT)


def suspend_it(agent: int, stores: int) -> None:
    freeze(stores)


@pytest.mark.parametrize(
    "end_it", [kill_it, suspend_the_agent, pytest.param(suspend_it, marks=pytest.mark.prove)]
)
def test_a_run_continues_when_the_process_of_its_store_ends_and_another_one_serves_it(
    tmp_path: Path, end_it: Callable[[int, int], None]
) -> None:
    with running(tmp_path, *WARM, "train.py") as run:
        before = run.stores_process()
        end_it(run.agent.pid, before)
        wait_for("the process to end", lambda: before not in process_ids())
        wait_for("another one", lambda: any(map(serves_stores, pids_below(run.agent.pid))))
        (tmp_path / "may-end").touch()
        assert run.agent.wait() == 0
        assert run.starts == ["0"]


def test_a_torch_that_cannot_be_imported_is_named(tmp_path: Path) -> None:
    (tmp_path / "torch").mkdir()
    (tmp_path / "torch" / "__init__.py").write_text(
        "raise ImportError('libcudart.so.13: cannot open shared object file')"
    )
    (tmp_path / "train.py").write_text("print('hello')")
    done = elastic_agent(
        *("--standalone", *WARM, str(tmp_path / "train.py")), variables={"PYTHONPATH": str(tmp_path)}
    )
    assert done.returncode == 2
    assert "libcudart.so.13" in done.stderr
    assert done.stderr.splitlines()[-1].endswith(f"try {sys.executable} -c 'import torch'")
