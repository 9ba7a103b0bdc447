"""The etcd3 package's messages on several versions of protobuf, each in a process of its own, at a real etcd."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.etcd import EtcdCluster

OTHER_VERSIONS = ["3.20.3", "4.25.8", "5.29.5", "6.33.0"]
"""The oldest that has what is needed, and the last of each kind since; pip fetches them."""

WITHOUT_A_FAST_ONE = {"3.20.3": "for Python 3.11, 3.20 is published in pure Python only"}

USE = """
import asyncio, contextlib, json, os, sys
before = dict(os.environ)
from elastic_agent.transport.etcd.api import delete, get, has_value, is_missing, put
from elastic_agent.transport.etcd.client import EtcdClient
from elastic_agent.transport.etcd import EtcdTable
from elastic_agent.values import Endpoint, EtcdAccess
import google.protobuf
from google.protobuf.internal import api_implementation

async def use():
    client = await EtcdClient.dial(Endpoint("127.0.0.1", int(sys.argv[1])), EtcdAccess(), 60.0)
    key = sys.argv[2].encode()
    first = await client.transact([is_missing(key)], [put(key, b"one")])
    replace = put(key, b"two", await client.grant(600))
    second = await client.transact([has_value(key, b"one")], [replace], [get(key)])
    third = await client.transact([has_value(key, b"one")], [delete(key)], [get(key)])
    async with contextlib.aclosing(client.follow(key, None, first.header.revision)) as changes:
        news = await anext(changes)
    value = await client.get(key)
    await client.keep_alive(value.lease)
    await client.revoke(value.lease)
    print(json.dumps({
        "done": [first.succeeded, second.succeeded, third.succeeded],
        "found": third.responses[0].response_range.kvs[0].value.decode(),
        "value": value.value.decode(),
        "news": sorted(value.decode() for value in news.written.values()),
        "gone": await client.get(key),
        "version": google.protobuf.__version__,
        "implementation": api_implementation.Type(),
        "environment": sorted({*before.items()} ^ {*os.environ.items()}),
    }))
    client.close()

async def leave_open():
    # as a process that ends while others wait for changes
    client = await EtcdClient.dial(Endpoint("127.0.0.1", int(sys.argv[1])), EtcdAccess(), 60.0)
    await EtcdTable(client, "/tests/protobuf/").wait("x/y", 0.01)

asyncio.run(use())
asyncio.run(leave_open())
"""


def provided(version: str, folder: Path) -> dict[str, str]:
    """Return the environment in which this version is found first."""
    here = os.environ | {"PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    here = {
        name: value for name, value in here.items() if not name.startswith(("GRPC_", "PROTOCOL_BUFFERS_"))
    }
    if version == "installed":
        return here
    install = [sys.executable, "-m", "pip", "install", "--quiet", "--no-deps", "--disable-pip-version-check"]
    install += ["--target", str(folder), f"protobuf=={version}"]
    plain = {name: value for name, value in os.environ.items() if name != "PIP_CONSTRAINT"}
    subprocess.run(install, check=True, env=plain)
    return here | {"PYTHONPATH": os.pathsep.join((str(folder), here["PYTHONPATH"]))}


def executed(program: str, *arguments: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-c", program, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.prove
@pytest.mark.parametrize("version", ["installed", *OTHER_VERSIONS])
def test_the_etcd_api_works_with_every_protobuf(
    shared_etcd: EtcdCluster, tmp_path: Path, version: str
) -> None:
    port = str(shared_etcd.members[0].client_port)
    done = executed(USE, port, f"/tests/protobuf/{version}", environment=provided(version, tmp_path))
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    said = json.loads(done.stdout)
    assert said["done"] == [True, True, False]
    assert (said["found"], said["value"], said["gone"]) == ("two", "two", None)
    assert said["news"] in (["one"], ["two"]), "news holds the newest, whether told one by one or together"
    assert said["environment"] == [], "workers inherit nothing of it"
    assert version in ("installed", said["version"])
    if version not in WITHOUT_A_FAST_ONE:
        assert said["implementation"] == "upb"


def test_another_package_named_etcd3_is_reported(tmp_path: Path) -> None:
    generated = tmp_path / "etcd3" / "etcdrpc" / "kv_pb2.py"
    generated.parent.mkdir(parents=True)
    generated.write_text('DESCRIPTOR = "generated otherwise"\n')
    (tmp_path / "etcd3" / "__init__.py").touch()
    environment = provided("installed", Path())
    environment["PYTHONPATH"] = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    done = executed("import elastic_agent.transport.etcd", environment=environment)
    assert f"{generated} contains no serialized descriptor; expected etcd3 0.12" in done.stderr


@pytest.mark.prove
def test_grpc_writes_nothing_to_standard_error(shared_etcd: EtcdCluster) -> None:
    """It would between the lines of the workers; a broken handshake is worth two lines to it."""
    provoke = """
import asyncio, sys
from elastic_agent.transport.etcd.api import grpc
from elastic_agent.transport.etcd.client import EtcdClient

async def provoke():
    channel = grpc.aio.secure_channel(sys.argv[1], grpc.ssl_channel_credentials(b"no certificate"))
    try:
        await channel.unary_unary("/a/b")(b"", timeout=60)
    except grpc.RpcError as error:
        print(error.code().name)

asyncio.run(provoke())
"""
    installed = provided("installed", Path())
    done = executed(provoke, shared_etcd.members[0].endpoint, environment=installed)
    assert done.stdout == "UNAVAILABLE\n"
    assert done.stderr == ""
