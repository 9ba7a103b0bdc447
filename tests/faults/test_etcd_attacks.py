"""A run with a secret in an etcd with certificates from it: agents without the secret end with one line."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from elastic_agent.exit_codes import ExitCode
from tests.etcd import EtcdCluster

from .conftest import MakeCluster
from .leaks import secret_file
from .rules import check_one_error, see_it_end, undisturbed

pytestmark = [pytest.mark.system, pytest.mark.prove]


@pytest.fixture
def ours(tmp_path: Path) -> str:
    return secret_file(tmp_path, "ours")


@pytest.fixture
def etcd(tmp_path: Path, ours: str) -> Iterator[str]:
    with EtcdCluster.with_secret(tmp_path, Path(ours)) as cluster:
        yield cluster.endpoints


def test_agents_with_the_secret_train_in_a_closed_etcd_and_others_end_with_one_line(
    make_cluster: MakeCluster, tmp_path: Path, ours: str
) -> None:
    cluster = make_cluster("2:4", etcd_is_new=True)
    for name in "ab":
        cluster.start(name, 1, "--secret-file", ours)
    first = cluster.wait_training("a", "b")
    for options, words in (
        (("--secret-file", secret_file(tmp_path, "theirs")), "has certificates of another secret"),
        ((), "accepts only agents with its secret"),
    ):
        stranger = make_cluster("2:4", *options, etcd_is_new=True)
        stranger.start("c")
        assert stranger.wait_end() == {"c": ExitCode.NO_STORE}, stranger.story()
        check_one_error(stranger, words)
    undisturbed(cluster, first)
    see_it_end(cluster, restarts=0)
