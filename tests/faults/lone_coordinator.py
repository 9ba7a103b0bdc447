"""``python lone_coordinator.py ENDPOINT PREFIX RUN STATE_DIR``: coordinates a run in etcd and takes no part in it."""

from __future__ import annotations

import asyncio
import sys
from pathlib import Path

from elastic_agent.logs import configure_logging
from elastic_agent.rendezvous.backends.etcd.backend import Members
from elastic_agent.rendezvous.backends.etcd.election import Election
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.transport import RunKeys, begun_life_of
from elastic_agent.transport.etcd import EtcdTable
from elastic_agent.values import Endpoint, EtcdAccess
from tests.faults.cluster import SHORT_LEASE_S


async def main() -> None:
    endpoint, prefix, run_id, state_dir = sys.argv[1:]
    first, *others = (
        Endpoint(host, int(port)) for host, _, port in (one.partition(":") for one in endpoint.split(","))
    )
    members = Members(Endpoint(first.host, first.port, tuple(others)), EtcdAccess(prefix))
    configure_logging("json", "debug", sys.stderr)
    history_store = RunHistoryStore(Path(state_dir))
    table = EtcdTable(await members.dial(), members.root)
    await begun_life_of(table, RunKeys(run_id))  # as the first node does
    await Election(run_id, members.root, members.dial, history_store, SHORT_LEASE_S).live()


if __name__ == "__main__":
    asyncio.run(main())
