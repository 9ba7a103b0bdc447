"""``torchrun --rdzv-conf`` is checked like elastic-agent's own options."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from torch.distributed.elastic.rendezvous import RendezvousParameters

from elastic_agent.protocol import Member, Phase, decode, encode
from elastic_agent.rendezvous.run_history import RunHistoryStore
from elastic_agent.torchrun import plugin
from elastic_agent.torchrun.plugin import elastic_etcd_handler, elastic_handler
from elastic_agent.transport.c10d import serve_here
from tests.loop_thread import Blocking
from tests.protocol.support import on_disk

create_handler, create_etcd_handler = elastic_handler(), elastic_etcd_handler()


@pytest.fixture
def made(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[SimpleNamespace]:
    """Return what the nodes of handlers are made of; none of them takes part in a run."""
    nodes: list[SimpleNamespace] = []

    def node(backend: Any, member: Member, *_: object) -> None:
        nodes.append(SimpleNamespace(backend=backend, member=member))

    monkeypatch.setenv("ELASTIC_AGENT_STATE_DIR", str(tmp_path))
    monkeypatch.setattr(plugin, "StoreServers", lambda _: SimpleNamespace(serve=serve_here))
    monkeypatch.setattr(plugin, "TorchrunNode", node)
    monkeypatch.setattr(plugin, "ElasticRendezvous", lambda *_: None)
    return nodes


@pytest.mark.parametrize(
    ("conf", "wrong"),
    [
        ({"lease_tll": "5"}, 'unknown key "lease_tll"; .*did you mean lease_ttl'),
        ({"port_range": "9"}, 'port_range: got "9".*expected LOW:HIGH'),
        ({"start_timeout": "0"}, 'start_timeout: got "0", which is too short'),
        (
            {"lease_ttl": "0.1"},
            '--rdzv-conf: lease_ttl: got "0.1", which is too short; expected seconds, 0.5 or more',
        ),
        ({"lease_ttl": "7200"}, 'lease_ttl: got "7200", which is more than 3600; expected .* 3600 at most'),
        ({"fence_margin": "0"}, 'fence_margin: got "0", which is too short; expected seconds, more than 0'),
        ({"settle": "-1"}, 'settle: got "-1", which is too short; expected seconds, 0 or more'),
        (
            {"timeout": "nan"},
            'timeout: got "nan", which is not a number of seconds; expected seconds, more than 0',
        ),
        ({"etcd_user": "me"}, "requires a password"),
    ],
)
def test_what_elastic_agent_rejects_is_a_value_error(
    conf: dict[str, str], wrong: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    params = RendezvousParameters(
        "elastic-etcd", "127.0.0.1:2379", "train", 1, 1, **({"timeout": 900} | conf)
    )
    with pytest.raises(ValueError, match=wrong):
        create_etcd_handler(params)


@pytest.mark.parametrize("conf", [{"is_host": "1"}, {"cacert": "/ca.pem"}])
def test_a_key_without_effect_is_named(
    conf: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    params = RendezvousParameters("elastic", "127.0.0.1:29400", "train", 1, 1, secret_file="/missing", **conf)
    with pytest.raises(ValueError, match="secret-file"):  # takes no part in a run
        create_handler(params)
    (key,) = conf
    assert f"--rdzv-conf: {key} has no effect" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("variables", "at_least_s"),
    [
        ({}, 30.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 30.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "600"}, 600.0),
        ({"PET_SHUTDOWN_TIMEOUT": "600", "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "5"}, 600.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "soon"}, 30.0),
        ({"TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "9" * 30}, 86400.0),
    ],
)
def test_the_others_wait_for_a_torchrun_as_long_as_it_waits_for_its_workers(
    variables: dict[str, str],
    at_least_s: float,
    made: list[SimpleNamespace],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Before a restart torchrun gives them 30 s, whatever the variables say."""
    for name in plugin.SHUTDOWN_TIMEOUTS:
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    create_handler(RendezvousParameters("elastic", "127.0.0.1:29400", "train", 1, 1))
    sent = decode(Member, encode(made[0].member))
    assert at_least_s < sent.stop_s


@pytest.fixture
def no_variables_were_taken() -> Iterator[None]:
    plugin._secret_variables.cache_clear()
    yield
    plugin._secret_variables.cache_clear()


@pytest.mark.usefixtures("no_variables_were_taken")
def test_every_handler_for_etcd_gets_the_secret_and_the_password_from_their_variables(
    made: list[SimpleNamespace], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_SECRET", "0123456789abcdef")
    monkeypatch.setenv("ELASTIC_AGENT_ETCD_PASSWORD", "hunter2")
    for _ in range(2):
        create_etcd_handler(RendezvousParameters("elastic-etcd", "127.0.0.1", "train", 1, 1, etcd_user="me"))
    assert [node.backend.secret.values for node in made] == [(b"0123456789abcdef",)] * 2
    assert [node.backend._members.access.password for node in made] == ["hunter2"] * 2


def test_runs_of_one_name_at_two_endpoints_do_not_share_history(
    made: list[SimpleNamespace], tmp_path: Path
) -> None:
    """torchrun calls a run "none" by default; of two at once, one would take the other's verdict for its own."""
    for port in (29500, 29501):
        create_handler(RendezvousParameters("elastic", f"127.0.0.1:{port}", "none", 1, 1))
    first, second = (Blocking(node.backend.history_store) for node in made)
    first.save("none", on_disk(7, outcome=Phase.FINISHED))
    assert second.load("none") is None
    assert Blocking(RunHistoryStore(tmp_path)).load("none") is None, "nor does an agent's run"

    create_handler(RendezvousParameters("elastic", "127.0.0.1:29500", "none", 1, 1))
    known = Blocking(made[2].backend.history_store).load("none")
    assert known.generation == 7
    assert known.settled, "a torchrun that is started again is a new run"


def test_a_secret_and_certificates_for_etcd_are_a_value_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ELASTIC_AGENT_STATE_DIR", str(tmp_path))
    conf = {"secret_file": str(tmp_path / "secret"), "cacert": str(tmp_path / "ca.pem")}
    params = RendezvousParameters("elastic-etcd", "127.0.0.1", "train", 1, 1, **conf)
    with pytest.raises(ValueError, match="leave out the certificates for etcd, or the secret"):
        create_etcd_handler(params)
