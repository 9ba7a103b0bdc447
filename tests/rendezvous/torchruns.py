"""Stock torchruns on this machine, and workers that do as the test says."""

from __future__ import annotations

import contextlib
import json
import socket
import sys
import textwrap
import time
from pathlib import Path
from typing import Any

from elastic_agent.testing.processes import NodeProcess
from tests.ports import free_port
from tests.processes import Processes

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


class Stage(Processes):
    """The torchruns of a test, and where all their workers show up."""

    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
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
    ) -> NodeProcess:
        """Start a torchrun with our rendezvous."""
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
            "XDG_STATE_HOME": str(self.folder / "state"),
            "RES_OPTIONS": "timeout:1 attempts:1",  # torchrun looks names up; a lost packet costs 5 s
            **env,
        }
        self.agents[name] = self.launch(name, command, said)
        return self.agents[name]

    def end(self, torchrun: NodeProcess) -> int:
        """Wait for the end of a torchrun; returns its exit code."""
        return self.wait_end(torchrun.name)[torchrun.name]

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
        return sorted(came, key=lambda worker: worker.rank)

    def __exit__(self, *how: object) -> None:
        self._listener.close()
        super().__exit__(*how)


def places(workers: list[Worker]) -> list[tuple[str, int, int, int, int]]:
    """Return of each worker: node, rank, node rank, local rank, world size."""
    names = ("RANK", "GROUP_RANK", "LOCAL_RANK", "WORLD_SIZE")
    return [(worker.node, *(int(worker.env[name]) for name in names)) for worker in workers]  # type: ignore[misc]
