"""Stock torchruns on this machine, and workers that do as the test says."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from tests.ports import free_port

PATIENCE_S = 300.0
"""A guard against hangs."""

MARGIN_S, SETTLE_S = 0.5, 0.3

SCRIPT = """
import json, os, socket, sys

stage = socket.socket(socket.AF_UNIX)
stage.connect(sys.argv[1])
lines = stage.makefile("rw")
total = None
if "gloo" in sys.argv:
    import torch
    import torch.distributed as dist
    dist.init_process_group("gloo")
    mine = torch.tensor([2.0 ** dist.get_rank()])
    dist.all_reduce(mine)
    total = mine.item()
json.dump({"env": dict(os.environ), "pid": os.getpid(), "total": total}, lines)
lines.write("\\n")
lines.flush()
code = int(lines.readline() or 99)
if "gloo" in sys.argv:
    dist.destroy_process_group()
sys.exit(code)
"""


class Worker:
    """A worker that has come on stage and waits for its order."""

    def __init__(self, connection: socket.socket) -> None:
        self._lines = connection.makefile("rw")
        connection.close()
        hello: dict[str, Any] = json.loads(self._lines.readline())
        self.env: dict[str, str] = hello["env"]
        self.pid: int = hello["pid"]
        self.total: float | None = hello["total"]
        self.came_s = time.monotonic()

    @property
    def node(self) -> str:
        """The test's name of the torchrun it belongs to."""
        return self.env["TEST_NODE"]

    @property
    def rank(self) -> int:
        return int(self.env["RANK"])

    def exit(self, code: int) -> None:
        """Have it end."""
        with contextlib.suppress(OSError):
            self._lines.write(f"{code}\n")
            self._lines.flush()


@dataclass
class Torchrun:
    """One running torchrun."""

    name: str
    process: subprocess.Popen[bytes]
    log: Path

    def said(self) -> str:
        return self.log.read_text(errors="replace")

    def kill_node(self) -> None:
        """SIGKILL to torchrun and its workers."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()

    def end(self) -> int:
        """Wait for its end; its exit code."""
        try:
            return self.process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} does not end; it wrote:\n{self.said()}") from None


class Stage:
    """Where the workers of all torchruns of a test show up."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.backend = "elastic"
        self.lease_s = 60.0
        self.address = ("127.0.0.1", free_port())
        self.endpoint = "{}:{}".format(*self.address)
        self._script = folder / "script.py"
        self._script.write_text(textwrap.dedent(SCRIPT))
        self._address = str(folder / "stage")
        self._listener = socket.socket(socket.AF_UNIX)
        self._listener.bind(self._address)
        self._listener.listen(64)
        self._listener.settimeout(PATIENCE_S)
        self.torchruns: list[Torchrun] = []
        self._kept: list[Worker] = []
        """A worker whose end of the line is dropped here would end."""

    def start(
        self,
        name: str,
        workers: int,
        nnodes: str,
        *options: str,
        script_args: tuple[str, ...] = (),
        **env: str,
    ) -> Torchrun:
        """Start a torchrun with our rendezvous."""
        log = self.folder / f"{name}.log"
        conf = f"lease_ttl={self.lease_s},fence_margin={MARGIN_S},settle={SETTLE_S},start_timeout=120"
        command = [
            *(sys.executable, "-m", "torch.distributed.run", "--rdzv-backend", self.backend),
            *("--rdzv-endpoint", self.endpoint, "--rdzv-id", "job", "--rdzv-conf", conf),
            *("--nnodes", nnodes, "--nproc-per-node", str(workers)),
            *options,
            *(str(self._script), self._address, *script_args),
        ]
        said = {
            "TEST_NODE": name,
            "OMP_NUM_THREADS": "1",
            "XDG_STATE_HOME": str(self.folder / "state"),
            **env,
        }
        said.setdefault(
            "RES_OPTIONS", "timeout:1 attempts:1"
        )  # torchrun looks names up; a lost packet costs 5 s
        with log.open("wb") as file:
            process = subprocess.Popen(
                command,
                stdin=subprocess.DEVNULL,
                stdout=file,
                stderr=file,
                start_new_session=True,
                env={**os.environ, **said},
            )
        torchrun = Torchrun(name, process, log)
        self.torchruns.append(torchrun)
        return torchrun

    def workers(self, count: int) -> list[Worker]:
        """The next workers that come on stage, by rank."""
        came: list[Worker] = []
        while len(came) < count:
            try:
                connection, _ = self._listener.accept()
            except TimeoutError:
                raise AssertionError(f"{len(came)} of {count} workers came\n{self.story()}") from None
            connection.settimeout(PATIENCE_S)
            with contextlib.suppress(ValueError):  # one that was stopped before it could speak
                came.append(Worker(connection))
        self._kept += came
        return sorted(came, key=lambda one: one.rank)

    def story(self) -> str:
        return "\n".join(f"--- {one.name}\n{one.said()[-4000:]}" for one in self.torchruns)

    def close(self) -> None:
        self._listener.close()
        for torchrun in self.torchruns:
            torchrun.kill_node()


@contextmanager
def open_stage(folder: Path) -> Iterator[Stage]:
    stage = Stage(folder)
    try:
        yield stage
    finally:
        stage.close()


def places(workers: list[Worker]) -> list[tuple[str, int, int, int, int]]:
    """Of each worker: node, rank, node rank, local rank, world size."""
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")
    return [(one.node, *(int(one.env[name]) for name in names)) for one in workers]  # type: ignore[misc]
