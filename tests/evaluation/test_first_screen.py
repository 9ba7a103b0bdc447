"""The last lines of each terminal of a run name cause, machine and remedy of a failure.

`make prove` makes the failures that nothing else tests, `make evaluate` (EVALUATE=all) all of the tables.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from .connecting import CONNECTING
from .failing import FAILING, HANGING, Kind, lacking
from .losing import LOSING
from .stage import Case, staged
from .starting import STARTING

pytestmark = [pytest.mark.system, pytest.mark.prove]

ALL = os.environ.get("EVALUATE") == "all"
ALONE = {
    "different run ids on the machines",
    "different versions of the script, no run id",
    "an agent of an earlier start still runs on a machine",
    "an endpoint that is no machine's address",
    "--nnodes forgotten on a machine",
    "the script sets MASTER_ADDR=localhost",
    "the disk of the workers' output is full",
}
CASES = [case for case in (*STARTING, *CONNECTING, *LOSING) if ALL or case.name in ALONE]
JOBS = [
    pytest.param(FAILING, True, id="failing, beside harmless lines"),
    pytest.param(HANGING, False, id="hanging"),
]
if ALL:
    JOBS += [pytest.param(FAILING, False, id="failing")]
JOB_S = 300.0


@pytest.fixture(autouse=True)
def _tools() -> None:
    missing = [tool for tool in ("nft", "unshare", "ss") if shutil.which(tool) is None]
    if missing:
        pytest.skip(f"this needs {', '.join(missing)} (Debian: iproute2, nftables)")


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)
def test_every_terminal_names_cause_machine_and_remedy(case: Case, tmp_path: Path) -> None:
    with staged(tmp_path, case.nodes, case.nnodes, case.run_id) as stage:
        case.play(stage)
        stage.check(case.expected)


@pytest.mark.parametrize(("kinds", "noisy"), JOBS)
def test_every_terminal_explains_how_a_generation_failed_whatever_else_is_written(
    kinds: tuple[Kind, ...], noisy: bool, tmp_path: Path
) -> None:
    assert not (unexplained := lacking(kinds, tmp_path / "stage", JOB_S, noisy=noisy)), "\n".join(unexplained)
