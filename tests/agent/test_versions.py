"""Agents of different versions: the one that cannot take part says so and ends."""

from __future__ import annotations

from pathlib import Path

import msgspec
from torch.distributed import TCPStore

from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import encode
from elastic_agent.protocol.records import RECORD_VERSION
from elastic_agent.transport import c10d
from elastic_agent.values import Endpoint
from tests.agent.support import elastic_agent
from tests.loop_thread import Blocking, in_loop
from tests.names import unique
from tests.transport.support import PATIENCE_S, life_keys, plan


def test_an_agent_ends_if_another_version_coordinates_the_run(tmp_path: Path) -> None:
    host = in_loop(c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S))
    assert host is not None
    endpoint = Endpoint("127.0.0.1", host.port)
    other = msgspec.json.encode(
        msgspec.json.decode(encode(plan(1))) | {"format": RECORD_VERSION + 1, "new_field": 1}
    )
    run_id = unique("run")
    table = in_loop(c10d.open_table(endpoint, PATIENCE_S))
    key = f"{life_keys(table, run_id).plans}1"
    Blocking(table).put(key, b'{"plan": ' + other + b"}")
    script = tmp_path / "train.py"
    script.write_text("")
    options = ["--rdzv-endpoint", str(endpoint), "--rdzv-id", run_id, "--nnodes", "1:2"]
    done = elastic_agent(
        *options, "--state-dir", str(tmp_path / "state"), "--log-format", "console", str(script)
    )
    Blocking(host).close()
    assert done.returncode == ExitCode.NO_STORE, done.stderr
    assert (
        "the run is coordinated by another version of elastic-agent "
        f"(records of version {RECORD_VERSION + 1}; this agent supports {RECORD_VERSION}); "
        "install the same version on all machines" in done.stderr
    )


def test_an_agent_ends_if_another_version_created_the_store(tmp_path: Path) -> None:
    server = TCPStore("127.0.0.1", 0, None, True, wait_for_workers=False)
    server.set("elastic-agent/1/id", "0123456789abcdef")
    script = tmp_path / "train.py"
    script.write_text("")
    endpoint = f"127.0.0.1:{server.port}"
    options = ["--rdzv-endpoint", endpoint, "--rdzv-id", unique("run"), "--nnodes", "1:2"]
    done = elastic_agent(
        *options, "--state-dir", str(tmp_path / "state"), "--log-format", "console", str(script)
    )
    assert done.returncode == ExitCode.NO_STORE, done.stderr
    assert f"the store at {endpoint} was created by another version of elastic-agent" in done.stderr
