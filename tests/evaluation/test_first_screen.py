"""What the terminals of a run show: the last lines of each name cause, machine and remedy of a failure.

Those of all failures are rated by ``python -m evaluation first_screen``; here are some that nothing else tests.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from evaluation.cases import Case, Rating, rated
from evaluation.connecting import CONNECTING
from evaluation.failing import FAILING, HANGING, rated_in_one_job
from evaluation.losing import LOSING
from evaluation.starting import STARTING

pytestmark = [pytest.mark.system, pytest.mark.prove]

ALONE = (
    "different run ids on the machines",
    "different versions of the script, no run id",
    "an agent of an earlier start still runs on a machine",
    "an endpoint that is no machine's address",
    "slow reverse look-ups of names",
    "--nnodes forgotten on a machine",
    "the script sets MASTER_ADDR=localhost",
    "the disk of the workers' output is full",
)
IN_ONE_JOB = (
    "exit-3",
    "sigkill",
    "sigsegv",
    "not-shared",
    "disk-full",
    "shm",
    "port-taken",
    "gloo-interface",
)
CASES = {one.name: one for one in (*STARTING, *CONNECTING, *LOSING)}
JOB_S = 120.0


@pytest.fixture(autouse=True)
def _machines() -> None:
    missing = [one for one in ("ip", "nft", "unshare", "ss") if shutil.which(one) is None]
    if os.geteuid() != 0 or missing:
        pytest.skip(
            f"this needs root and {', '.join(missing) or 'network namespaces'} (Debian: iproute2, nftables)"
        )


def check(rating: Rating) -> None:
    for one in rating.terminals:
        assert one.points == 3, f"{rating.name}, on {one.node}:\n{one.screen}"


@pytest.mark.parametrize("case", [CASES[name] for name in ALONE], ids=lambda case: case.name)
def test_every_terminal_names_cause_machine_and_remedy(case: Case, tmp_path: Path) -> None:
    check(rated(case, tmp_path / "stage"))


def test_every_terminal_explains_how_a_generation_failed_whatever_else_is_written(tmp_path: Path) -> None:
    kinds = [one for one in (*FAILING, *HANGING) if one.kind in (*IN_ONE_JOB, "other-collective")]
    for rating in rated_in_one_job(kinds, tmp_path / "stage", JOB_S, noisy=True):
        check(rating)
