"""Agents of different versions: the one that cannot take part says so and ends."""

from __future__ import annotations

from pathlib import Path

import msgspec

from elastic_agent.exit_codes import ExitCode
from elastic_agent.protocol import encode
from elastic_agent.protocol.records import RECORD_VERSION
from elastic_agent.transport import c10d
from elastic_agent.values import Endpoint
from tests.agent.support import elastic_agent
from tests.loop_thread import Blocking, in_loop
from tests.names import unique
from tests.transport.support import PATIENCE_S, life_keys, plan, torchs_server


def refused(endpoint: str, run_id: str, folder: Path) -> str:
    """Return what an agent says that cannot take part."""
    script = folder / "train.py"
    script.write_text("")
    options = ["--rdzv-endpoint", endpoint, "--rdzv-id", run_id, "--nnodes", "1:2"]
    options += ["--state-dir", str(folder / "state"), "--log-format", "console"]
    done = elastic_agent(*options, str(script))
    assert done.returncode == ExitCode.NO_STORE, done.stderr
    return done.stderr


def test_an_agent_ends_if_another_version_coordinates_the_run(tmp_path: Path) -> None:
    host = in_loop(c10d.find_or_host(Endpoint("127.0.0.1", 0), PATIENCE_S))
    assert host is not None
    endpoint = Endpoint("127.0.0.1", host.port)
    newer = {"format": RECORD_VERSION + 1, "new_field": 1}
    other = msgspec.json.encode(msgspec.json.decode(encode(plan(1))) | newer)
    run_id = unique("run")
    table = in_loop(c10d.open_table(endpoint, PATIENCE_S))
    Blocking(table).put(life_keys(table, run_id).plan, other)
    said = refused(str(endpoint), run_id, tmp_path)
    Blocking(host).close()
    assert (
        "the run is coordinated by another version of elastic-agent "
        f"(records of version {RECORD_VERSION + 1}; this agent supports {RECORD_VERSION}); "
        "install the same version on all machines" in said
    )


def test_an_agent_ends_if_another_version_created_the_store(tmp_path: Path) -> None:
    server = torchs_server()
    server.set("elastic-agent/1/id", "0123456789abcdef")
    endpoint = f"127.0.0.1:{server.port}"
    said = refused(endpoint, unique("run"), tmp_path)
    assert f"the store at {endpoint} was created by another version of elastic-agent" in said
