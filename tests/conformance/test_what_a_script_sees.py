"""What a script sees of its process, item by item: the same as under ``python -u``, however it is started."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from tests.lanes import shared_folder

from .launchers import BARE, COLD, LAUNCHERS, SCRIPTS, WARM, Job, Launcher, launchers, run_everywhere

PROBE = SCRIPTS / "probe_package" / "probe.py"
ODD_ARGUMENTS = (
    "",
    " two  blanks ",
    "-u",
    "--",
    "--nnodes",
    "-m",
    "für ∀",
    b"not \xff utf-8",
    "a\nb",
    "'\"$x\\",
)

Report = dict[str, Any]
Key = tuple[str, int, int]
"""Launcher, attempt, rank."""

DRAWN_BY_LOT = {
    "hash of a text": "hash randomization",
    "random.random()": "seeded at the start of each process",
    "numpy.random.random()": "seeded at its import",
    "uuid.uuid4()": "",
    "uuid.uuid1()": "holds the time",
    "os.urandom()": "",
    "authentication key of multiprocessing": "a secret of each process",
    "names of temporary files": "must not collide",
    "pid": "",
    "torch: initial seed": "torch seeds its generator by lot at its import",
    "torch: first random number": "follows from that seed",
}
"""Items that no two workers share. They are not compared but must differ."""

COMPARED_IN_ANOTHER_WAY = {
    "frames from the module outwards": "a warm worker may have one or two more outside",
    "os.environ": "each launcher adds its own variables",
    "torch: os.environ": "each launcher adds its own variables",
    "signal at the death of its parent": "bare Python's parent is this test, which asks for none",
}

_FINDER = "documented: it adapts transformers when the script imports it"
_FAULTHANDLER = "documented: it writes the stacks when native code crashes"

LEGITIMATE: dict[str, dict[str, str]] = {
    COLD.name: {
        "sys.meta_path": _FINDER,
        "torch: sys.meta_path": _FINDER,
        "faulthandler": _FAULTHANDLER,
        "the kernel's copy of the environment": "documented: it still has the folder of the startup hook",
    },
    WARM.name: {
        "faulthandler": _FAULTHANDLER,
        "sys.meta_path": _FINDER,
        "torch: sys.meta_path": _FINDER,
        "hash of a text": "drawn when an interpreter starts: a node's warm workers share one interpreter's",
        "torch: operators it knows": "documented: those of torch._dynamo, which cannot be taken back, are there",
        "torch: threads in /proc": "the pool of numpy's BLAS is started by its import, and is not forked",
    },
}
"""By launcher: items that may differ, each with the reason."""

FRAMES_OUTSIDE_A_WARM_WORKER = 4
"""How many more frames than under bare Python a warm worker may have outside its module, at most."""

SET_BY_LAUNCHERS = {
    "RANK": "stands for each worker",
    "LOCAL_RANK": "stands for each worker",
    "MASTER_ADDR": "plain Python has no rendezvous",
    "MASTER_PORT": "plain Python has no rendezvous; another each time",
    "WORLD_SIZE": "set by the test for bare Python",
    "LOCAL_WORLD_SIZE": "set by the test for bare Python",
    "GROUP_RANK": "torchrun's documented variable",
    "GROUP_WORLD_SIZE": "torchrun's documented variable",
    "ROLE_RANK": "torchrun's documented variable",
    "ROLE_NAME": "torchrun's documented variable",
    "ROLE_WORLD_SIZE": "torchrun's documented variable",
    "TORCH_NCCL_ASYNC_ERROR_HANDLING": "set by the test for bare Python",
    "GLOO_SOCKET_IFNAME": "documented: the interface under whose address others reach this node",
}
PREFIXES_OF_LAUNCHERS = ("TORCHELASTIC_", "ELASTIC_AGENT_")
"""Documented variables of torchrun and of the agent."""

VARIANTS = {
    "a script": {},
    "a module, with settings in the environment": {
        "PYTHONHASHSEED": "7",
        "PYTHONWARNINGS": "default::DeprecationWarning:somewhere",
        "PYTHONFAULTHANDLER": "1",
        "PYTHONIOENCODING": "latin-1:replace",
        "PYTHONINTMAXSTRDIGITS": "5000",
        "OMP_NUM_THREADS": "2",
        "TZ": "Asia/Tokyo",
        "LC_ALL": "C.UTF-8",
        "PYTHONMALLOC": "malloc",
    },
}


class Reports:
    """What every worker of one variant reported."""

    def __init__(self, variant: str, folder: Path) -> None:
        self.variant = variant
        self._found: dict[Key, Report] = {}
        for path in folder.glob("*/report-*.json"):
            _, attempt, rank = path.stem.split("-")
            self._found[path.parts[-2], int(attempt), int(rank)] = json.loads(path.read_text())

    def of(self, launcher: str) -> dict[Key, Report]:
        return {key: report for key, report in self._found.items() if key[0] == launcher}

    def expected(self, key: Key) -> Report:
        """The report of bare Python with the same rank."""
        return self._found[BARE.name, 0, key[2]]


@pytest.fixture(
    scope="module",
    params=["a script", pytest.param(*[*VARIANTS][1:], marks=pytest.mark.prove)],
)
def reports(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Reports:
    """Both ranks of two attempts under every launcher; the first attempt is made to fail. Under Python, of one.

    Each attempt of cold workers is a new interpreter, like that of Python: in `make test`, they make one, too.
    """
    by_name = "module" in request.param
    job = Job(
        script="probe_package.probe" if by_name else os.path.relpath(PROBE, SCRIPTS),
        args=ODD_ARGUMENTS,
        module=by_name,
        slots=2,
        restarts=1,
        variables=VARIANTS[request.param],
    )

    once = [BARE] if by_name else [BARE, COLD]

    def run_all(folder: Path) -> None:
        outcomes = run_everywhere(job, folder, [launcher for launcher in LAUNCHERS if launcher not in once])
        outcomes |= run_everywhere(dataclasses.replace(job, restarts=0), folder, once)
        found = Reports(request.param, folder)
        for name, outcome in outcomes.items():
            there = sorted(key[1:] for key in found.of(name))
            told = {
                key: worker.stderr.decode(errors="replace")[-2000:] for key, worker in outcome.workers.items()
            }
            attempts = (0,) if name in [worker.name for worker in once] else (0, 1)
            expected = [(at, rank) for at in attempts for rank in (0, 1)]
            assert there == expected, f"{name}: {told} {outcome.said}"

    name = "probe-by-name" if by_name else "probe"
    return Reports(request.param, shared_folder(name, request, tmp_path_factory, run_all))


each_launcher = pytest.mark.parametrize("launcher", [launcher.name for launcher in LAUNCHERS])


@each_launcher
def test_scripts_see_the_same_as_under_plain_python(reports: Reports, launcher: str) -> None:
    not_compared = {*DRAWN_BY_LOT, *COMPARED_IN_ANOTHER_WAY, *LEGITIMATE.get(launcher, {})}
    for key, report in reports.of(launcher).items():
        assert report.keys() == reports.expected(key).keys()
    differences = [
        f"{item} of {key}: {report[item]!r}\nunder python -u: {reports.expected(key)[item]!r}"
        for key, report in reports.of(launcher).items()
        for item in report.keys() - not_compared
        if report[item] != reports.expected(key)[item]
    ]
    assert not differences, "\n".join(differences)


def test_there_is_something_to_compare(reports: Reports) -> None:
    seen = reports.of(BARE.name)[BARE.name, 0, 0]
    assert len(seen) > 100
    assert {*DRAWN_BY_LOT, *COMPARED_IN_ANOTHER_WAY} <= seen.keys()
    failed = [item for item, told in seen.items() if isinstance(told, dict) and "the probe failed" in told]
    assert failed == []


@each_launcher
def test_workers_have_different_random_seeds_unless_one_is_configured(
    reports: Reports, launcher: str
) -> None:
    those = {**reports.of(launcher), **reports.of(BARE.name)}
    for item in DRAWN_BY_LOT:
        drawn = {key: repr(report[item]) for key, report in those.items()}
        if item == "hash of a text" and "PYTHONHASHSEED" in VARIANTS[reports.variant]:
            assert len(set(drawn.values())) == 1, f"{item}, with a seed for hashes: {drawn}"
        elif item not in LEGITIMATE.get(launcher, {}):
            assert len(set(drawn.values())) == len(drawn), f"{item}: {drawn}"


@each_launcher
def test_the_script_is_the_outermost_frame_or_nearly_so(reports: Reports, launcher: str) -> None:
    item = "frames from the module outwards"
    allowed = FRAMES_OUTSIDE_A_WARM_WORKER if launcher == WARM.name else 0
    for key, report in reports.of(launcher).items():
        (depth, frames), (expected, without) = report[item], reports.expected(key)[item]
        assert expected <= depth <= expected + allowed, f"{key}: {frames}; under python -u: {without}"


@each_launcher
@pytest.mark.parametrize("item", ["os.environ", "torch: os.environ"])
def test_the_environment_is_the_launchers_plus_the_documented_variables(
    reports: Reports, launcher: str, item: str
) -> None:
    def others(environ: dict[str, str]) -> dict[str, str]:
        return {
            name: value
            for name, value in environ.items()
            if name not in {*SET_BY_LAUNCHERS, "CONFORMANCE_FOLDER"}
            and not name.startswith(PREFIXES_OF_LAUNCHERS)
        }

    for key, report in reports.of(launcher).items():
        assert others(report[item]) == others(reports.expected(key)[item]), key
        assert report[item]["RANK"] == report[item]["LOCAL_RANK"] == str(key[2])
        assert report[item]["TORCHELASTIC_RESTART_COUNT"] == str(key[1])


@each_launcher
def test_a_worker_dies_with_its_parent(reports: Reports, launcher: str) -> None:
    for key, report in reports.of(launcher).items():
        assert report["signal at the death of its parent"] == signal.SIGKILL, key


@launchers(WARM)
def test_streams_of_workers_are_a_terminal_if_the_agents_are(launcher: Launcher, tmp_path: Path) -> None:
    outcomes = run_everywhere(Job("terminal.py", terminal=True), tmp_path, [BARE, launcher])
    seen, expected = (
        json.loads((tmp_path / started.name / "terminal.json").read_text()) for started in (launcher, BARE)
    )
    assert expected.keys() == {"stdin", "stdout", "stderr", "controlling terminal"}
    assert seen == expected
    assert "a word on stdout" in outcomes[launcher.name].said
    assert "a word on stderr" in outcomes[launcher.name].said
