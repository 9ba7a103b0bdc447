"""How a worker ends: the same code and the same output, byte by byte, as under ``python -u``."""

from __future__ import annotations

import re

import pytest

from .launchers import BARE, LAUNCHERS, SCRIPTS, Job, Outcome, run_everywhere
from .tables import functions_of

pytestmark = pytest.mark.timeout(240)

ENDINGS = SCRIPTS / "endings.py"
GOOD = functions_of(ENDINGS, "succeeds")
BAD = functions_of(ENDINGS, "fails")

SAID_OTHERWISE = {
    # Documented: faulthandler writes the stacks when native code crashes.
    "aborts": re.compile(
        rb"^Fatal Python error: .*\n(?:\n|(?:Current thread|Thread) 0x.*\n|  File .*\n|Extension modules: .*\n)*",
        re.MULTILINE,
    ),
    # What stands above the module may be named by a warning about its caller: by bare Python as "sys:1".
    "warns": re.compile(rb"^\S+:\d+: (?=UserWarning: of its caller)|^  .*\n", re.MULTILINE),
}
ADDRESS = re.compile(rb"0x[0-9a-f]{6,}")
PID = re.compile(rb"\d+_$", re.MULTILINE)

Outcomes = dict[str, Outcome]

each_launcher = pytest.mark.parametrize("launcher", [one.name for one in LAUNCHERS])


def plain(name: str, output: bytes) -> bytes:
    """Output without what is never the same twice."""
    if name in SAID_OTHERWISE:
        output = SAID_OTHERWISE[name].sub(b"", output)
    return PID.sub(b"(pid)", ADDRESS.sub(b"(address)", output))


def compare(outcomes: Outcomes, launcher: str, name: str, place: tuple[int, int]) -> None:
    ended, expected = outcomes[launcher].worker(*place), outcomes[BARE.name].worker(*place)
    for stream in ("stdout", "stderr"):
        seen, wanted = (
            plain(name, getattr(one, stream)).decode(errors="replace") for one in (ended, expected)
        )
        assert seen == wanted, f"{name}: {stream} is\n{seen}\nunder python -u:\n{wanted}"
    assert ended.code == expected.code, f"{name}: code {ended.code}, under python -u {expected.code}"


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """All that succeed, at once: a worker each."""
    job = Job("endings.py", ("slots:" + ",".join(GOOD),), slots=len(GOOD))
    return run_everywhere(job, tmp_path_factory.mktemp("good"))


@pytest.fixture(scope="module")
def bad(tmp_path_factory: pytest.TempPathFactory) -> Outcomes:
    """All that fail, one after the other, each an attempt; the last attempt succeeds."""
    names = ",".join([*BAD, "falls_off_the_end"])
    job = Job("endings.py", ("attempts:" + names,), restarts=len(BAD))
    return run_everywhere(job, tmp_path_factory.mktemp("bad"))


@each_launcher
@pytest.mark.parametrize("name", GOOD)
def test_a_worker_that_succeeds(good: Outcomes, launcher: str, name: str) -> None:
    place = 0, GOOD.index(name)
    assert good[BARE.name].worker(*place).code == 0, good[BARE.name].worker(*place)
    compare(good, launcher, name, place)


@each_launcher
@pytest.mark.parametrize("name", BAD)
def test_a_worker_that_fails(bad: Outcomes, launcher: str, name: str) -> None:
    place = BAD.index(name), 0
    assert bad[BARE.name].worker(*place).code != 0, bad[BARE.name].worker(*place)
    compare(bad, launcher, name, place)
