"""The process group over which ranks agree on notices beside NCCL opens few connections, whatever their number."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from tests.client.support import AGENT_ENVIRONMENT, launched
from tests.waiting import GUARD_S

RANKS = 12
MEETS = """
import json, os, resource, sys, torch, torch.distributed as dist
from elastic_agent.integrations.lightning.notices import PacedAgreement

ranks, path = int(sys.argv[1]), sys.argv[2]

def sockets():
    with os.scandir("/proc/self/fd") as opened:
        return sum(os.readlink(one).startswith("socket:") for one in opened if os.path.islink(one))

def work(rank):
    store = dist.FileStore(path, ranks)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=ranks)
    most = resource.getrlimit(resource.RLIMIT_NOFILE)[1]
    resource.setrlimit(resource.RLIMIT_NOFILE, (8 * ranks - 1, most))
    dist.get_backend_config, dist.get_backend = lambda *_: "cuda:nccl", lambda *_: "nccl"
    before, variables = sockets(), dict(os.environ)
    agreement = PacedAgreement()
    assert dict(os.environ) == variables
    dist.get_backend_config, dist.get_backend = lambda *_: "cpu:gloo", lambda *_: "gloo"
    for _ in range(20):
        assert agreement.notice() is None
    print(json.dumps(sockets() - before), flush=True)
    dist.barrier()

started = []
for rank in range(ranks):
    if (pid := os.fork()) == 0:
        work(rank)
        os._exit(0)
    started.append(pid)
assert [os.waitpid(pid, 0)[1] for pid in started] == ranks * [0]
"""


def test_an_agreement_beside_nccl_connects_each_rank_to_a_few_others(tmp_path: Path) -> None:
    variables = {"WORLD_SIZE": str(RANKS), "GLOO_SOCKET_IFNAME": "lo"}
    done = subprocess.run(
        [sys.executable, "-c", MEETS, str(RANKS), str(tmp_path / "store")],
        env=launched({**AGENT_ENVIRONMENT, **variables}),
        capture_output=True,
        text=True,
        timeout=GUARD_S,
    )
    assert done.returncode == 0, done.stderr
    opened = [json.loads(line) for line in done.stdout.splitlines()]
    assert len(opened) == RANKS
    assert max(opened) < RANKS - 3, "it takes as many to connect to every other rank"
