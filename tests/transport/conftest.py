"""A store for each test."""

from __future__ import annotations

import secrets
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from elastic_agent.transport import Secret
from elastic_agent.transport.c10d import BootstrapStore, PortPicker, dialling, host
from tests.etcd import EtcdCluster

from .support import PATIENCE_S, C10dScene, Scene

if TYPE_CHECKING:
    from .etcd_scene import EtcdScene


@pytest.fixture(autouse=True)
def _calls_end_with_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have no call to a store given up because the machine is busy."""
    for module in (dialling, host):
        monkeypatch.setattr(module, "CALL_TIMEOUT_S", PATIENCE_S)


@pytest.fixture(scope="session")
def shared_etcd(tmp_path_factory: pytest.TempPathFactory) -> Iterator[EtcdCluster]:
    """Run one member, for all tests that change nothing in it."""
    with EtcdCluster(tmp_path_factory.mktemp("etcd")) as cluster:
        yield cluster


@pytest.fixture
def own_etcd(tmp_path: Path) -> Iterator[EtcdCluster]:
    """Run one member, for a test that stops it or changes its data."""
    with EtcdCluster(tmp_path) as cluster:
        yield cluster


@pytest.fixture
def store() -> Iterator[BootstrapStore]:
    """Serve a bootstrap store on a loopback address."""
    opened = BootstrapStore.open("127.0.0.1", PortPicker(None, 0.0))
    yield opened
    opened.close()


@pytest.fixture
def c10d_scene() -> Iterator[C10dScene]:
    scene = C10dScene()
    yield scene
    scene.close()


@pytest.fixture
def secret_scene() -> Iterator[C10dScene]:
    scene = C10dScene(secret=Secret((secrets.token_bytes(32),)))
    yield scene
    scene.close()


@pytest.fixture
def etcd_scene(shared_etcd: EtcdCluster) -> Iterator[EtcdScene]:
    from . import etcd_scene as etcd

    with etcd.etcd_scene(shared_etcd) as scene:
        yield scene


@pytest.fixture
def own_etcd_scene(own_etcd: EtcdCluster) -> Iterator[EtcdScene]:
    from . import etcd_scene as etcd

    with etcd.etcd_scene(own_etcd) as scene:
        yield scene


@pytest.fixture
def stopping_etcd_scene(own_etcd_scene: EtcdScene) -> EtcdScene:
    """Return one that is lost by SIGTERM, as from a service manager: etcd ends what is under way in good order."""
    own_etcd_scene.stop_signal = signal.SIGTERM
    return own_etcd_scene


def _scene(request: pytest.FixtureRequest) -> Scene:
    scene = request.getfixturevalue(request.param)
    assert isinstance(scene, Scene)
    return scene


scene = pytest.fixture(
    params=["c10d_scene", "secret_scene", "etcd_scene"],
    ids=["c10d", "c10d-with-secret", "etcd"],
    name="scene",
)(_scene)
"""Each kind of store: what holds for one holds for the other."""

scene_to_lose = pytest.fixture(
    params=["c10d_scene", "own_etcd_scene", "stopping_etcd_scene"],
    ids=["c10d", "etcd", "etcd-that-is-stopped"],
    name="scene_to_lose",
)(_scene)
"""The same, for a test that ends the store."""
