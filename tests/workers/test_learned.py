"""Modules that workers import are preloaded, if a worker forked afterwards is as good as one that imports them."""

from __future__ import annotations

import json
import os
import random
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.workers.spawner.generators import Generators
from elastic_agent.workers.spawner.installed import is_installed
from tests.cli.support import clean_environment

LEARNER = """
import json, os, sys
import torch

def learn(packages, source, folder):
    sys.path.insert(1, packages)
    from elastic_agent.workers.spawner.learned import NotLearnedError, SpoiledError, import_learned

    told = {"left_out": [], "why": ""}
    try:
        learned = import_learned(source, folder)
    except SpoiledError as spoiled:
        told["left_out"] = spoiled.left_out
    except NotLearnedError as error:
        told["why"] = str(error)
    else:
        told.update(names=learned.names, serial=learned.serial, reads=dict(learned.reads), outdated=learned.outdated())
    told["loaded"] = [name for name in source["watched"] if name in sys.modules]
    print(json.dumps(told), flush=True)

for request in sys.stdin:
    child = os.fork()
    if child == 0:
        learn(*json.loads(request))
        sys.exit(0)
    if os.waitpid(child, 0)[1] != 0:
        sys.exit("no answer to " + request)
"""
"""Has a fork of itself, which has imported torch as spawners have, learn what each line of its input says."""

MODULES = {
    "plain": "VALUE = 1",
    "needs_plain": "import plain",
    "reads_variable": "import os\nCACHE = os.environ.get('MY_CACHE', '')",
    "uses_reader": "import reads_variable",
    "reads_rank": "from os import environ\nRANK = environ.get('LOCAL_RANK', '0')",
    "copies_environment": "import os\nCOPY = dict(os.environ)",
    "starts_thread": (
        "import threading, time\nthreading.Thread(target=time.sleep, args=(1000,), daemon=True).start()"
    ),
    "uses_thread": "def start():\n    import starts_thread\nstart()",
    "temporary": "import tempfile\nFOLDER = tempfile.TemporaryDirectory()",
    "opens": "import os\nFILE = open(__file__)",
    "prints": "print('hello')",
    "shares": "import multiprocessing\nLOCK = multiprocessing.Lock()",
    "draws": "import numpy, uuid\nNAME = uuid.uuid4()\nGENERATOR = numpy.random.default_rng(7)",
    "makes_generator": "import numpy\nGENERATOR = numpy.random.default_rng()",
    "fails": "raise ImportError('no GPU')",
    "tries": "try:\n    import fails\nexcept ImportError:\n    pass",
}


Learner = subprocess.Popen[str]


class Spawner:
    """Has processes learn, as spawners do, from one pair of files."""

    def __init__(self, folder: Path, learner: Learner) -> None:
        self.learner = learner
        self.packages = folder / "site-packages"
        self.packages.mkdir()
        self.project = folder / "project"
        self.project.mkdir()
        self.reported = folder / "reported.json"
        self.verdict = folder / "verdict.json"
        for name, body in MODULES.items():
            (self.packages / f"{name}.py").write_text(body)

    def learn(self, *names: str, changed: dict[str, str] | None = None) -> dict[str, Any]:
        self.report(1, *names, changed=changed)
        return self._run(str(self.reported), names)

    def report(self, serial: int, *names: str, changed: dict[str, str] | None = None) -> str:
        """Write a report down as the agent does. Returns it."""
        content = {"version": 2, "serial": serial, "names": names, "changed": changed or {}}
        text = json.dumps(content)
        self.reported.write_text(text)
        return text

    def use_verdict(self, *watched: str) -> dict[str, Any]:
        return self._run("", watched)

    def _run(self, reported: str, watched: tuple[str, ...]) -> dict[str, Any]:
        source = {"verdict": str(self.verdict), "reported": reported, "of_workers": ["LOCAL_RANK"]}
        assert self.learner.stdin is not None
        assert self.learner.stdout is not None
        request = json.dumps([str(self.packages), {**source, "watched": watched}, str(self.project)])
        self.learner.stdin.write(request + "\n")
        self.learner.stdin.flush()
        told: dict[str, Any] = json.loads(self.learner.stdout.readline())
        return told


@pytest.fixture(scope="module")
def learner() -> Iterator[Learner]:
    with subprocess.Popen(
        [sys.executable, "-c", LEARNER],
        env=clean_environment(),
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as process:
        yield process


@pytest.fixture
def spawner(tmp_path: Path, learner: Learner) -> Spawner:
    return Spawner(tmp_path, learner)


def test_what_may_be_preloaded_is_preloaded_and_the_verdict_is_used_again(spawner: Spawner) -> None:
    told = spawner.learn("plain", "needs_plain", "reads_variable", "tries")
    assert told["names"] == ["plain", "needs_plain", "reads_variable", "tries"]
    assert told["reads"] == {"MY_CACHE": "reads_variable"}
    assert told["outdated"] == ""
    again = spawner.use_verdict("plain", "tries")
    assert (again["names"], again["loaded"]) == (told["names"], ["plain", "tries"])
    told = spawner.learn("reads_variable", "plain", changed={"MY_CACHE": "reads_variable"})
    assert told["names"] == ["reads_variable", "plain"], "the script sets the variable after the import"
    os.utime(spawner.packages / "plain.py", (1, 1))
    assert "plain.py has changed" in spawner.use_verdict("plain")["why"]


def test_modules_that_do_not_survive_a_fork_are_left_out_with_those_that_import_them(
    spawner: Spawner,
) -> None:
    """Each is named itself, with the reason; the others are preloaded."""
    (spawner.project / "beside.py").write_text("")
    (spawner.packages / "uses_beside.py").write_text("import beside")
    told = spawner.learn(
        *("plain", "needs_plain", "uses_reader", "reads_rank", "copies_environment", "uses_thread"),
        *("draws", "makes_generator"),
        *("temporary", "opens", "prints", "shares", "fails", "tries", "uses_beside", "missing"),
        changed={"MY_CACHE": "plain"},
    )
    reasons = {name: (reason, behind) for name, reason, behind in told["left_out"]}
    assert reasons == {
        "reads_variable": ("reads MY_CACHE, which the script sets before", 1),
        "reads_rank": ("reads LOCAL_RANK, which differs between workers", 0),
        "copies_environment": ("reads all environment variables when it is imported", 0),
        "starts_thread": (
            "has started threads (python), which do not survive a fork",
            1,
        ),
        "makes_generator": ("makes a random number generator when it is imported", 0),
        "temporary": ("creates a temporary file when it is imported", 0),
        "opens": (f"keeps {spawner.packages / 'opens.py'} open after it is imported", 0),
        "prints": ("prints something when it is imported", 0),
        "shares": ("creates shared memory when it is imported", 0),
        "beside": ("is not an installed module", 1),
    }
    clean = spawner.use_verdict(*MODULES, "uses_beside", "beside")
    assert clean["names"] == ["plain", "needs_plain", "draws", "tries"]
    assert clean["loaded"] == ["plain", "needs_plain", "draws", "tries"]


def test_what_is_reported_during_the_imports_is_taken_in(spawner: Spawner) -> None:
    later = spawner.report(2, "slow", "plain", "reads_variable", changed={"MY_CACHE": "plain"})
    code = f"open({str(spawner.reported)!r}, 'w').write({later!r})"
    (spawner.packages / "slow.py").write_text(code)
    told = spawner.learn("slow", "plain")
    assert told["left_out"] == [["reads_variable", "reads MY_CACHE, which the script sets before", 0]]
    clean = spawner.use_verdict("reads_variable")
    assert (clean["names"], clean["loaded"], clean["serial"]) == (["slow", "plain"], [], 2)


def test_a_damaged_file_is_not_used(tmp_path: Path) -> None:
    code = """
import sys
from elastic_agent.workers.spawner.learned import NotLearnedError, import_learned
for content in (
    *("", "{", "[]", '{"version": 2}', '{"version": 2, "serial": 1, "names": [1]}'),
    *('{"version": 2, "names": []}', '{"version": 0, "serial": 1, "names": []}'),
):
    with open(sys.argv[1], "w") as file:
        file.write(content)
    try:
        import_learned({"verdict": sys.argv[1], "reported": ""}, "/")
    except NotLearnedError as error:
        assert sys.argv[1] in str(error)
    else:
        sys.exit(f"{content!r} was used")
"""
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "verdict.json")], check=True)


def test_modules_of_the_standard_library_are_installed_and_the_script_is_not() -> None:
    assert [is_installed(name, sys.modules[name]) for name in ("json", "sys")] == [True, True]
    assert not is_installed("__main__", sys.modules["__main__"])
    assert not is_installed("elastic_agent", sys.modules["elastic_agent"])


def test_generators_that_the_system_has_seeded_are_seeded_again_and_others_are_not() -> None:
    generators = Generators()
    with generators.recorded():
        drawn, chosen, chosen_later = random.Random(), random.Random(7), random.Random()
        chosen_later.seed(7)
    before = [one.getstate() for one in (drawn, chosen, chosen_later)]
    generators.renew()
    after = [one.getstate() for one in (drawn, chosen, chosen_later)]
    assert after[0] != before[0]
    assert after[1:] == before[1:]
    assert random.Random(7).random() == chosen.random()


LATE = """
import os
from elastic_agent.workers.spawner.import_variables import watch_changes

changed = watch_changes({"MY_CACHE": "reads_variable"})
os.environ["MY_CACHE"] = "/scratch"
os.environ["OTHER"] = "1"
print(changed["MY_CACHE"], changed["OTHER"] > 0)
"""


def test_a_variable_that_a_preloaded_module_has_read_counts_as_set_before_it(tmp_path: Path) -> None:
    """The next trial leaves that module out: whether the script imports it before or after cannot be seen."""
    script = tmp_path / "train.py"
    script.write_text(LATE)
    ran = subprocess.run(
        [sys.executable, str(script)], env=clean_environment(), capture_output=True, text=True, timeout=60
    )
    assert ran.stdout == "0 True\n", ran.stderr
    assert "MY_CACHE is set in train.py, line 6, after reads_variable was preloaded" in ran.stderr


REPORTED_TWICE = """
import json, os, socket, sys
from elastic_agent.workers.spawner.import_report import ImportReports

line = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
line.bind("\\0" + sys.argv[1])
changed = {}
reports = ImportReports(sys.argv[1], 0, changed)
import wave
changed["MY_CACHE"] = len(sys.modules)
reports.finish()
import colorsys
reports.finish()
print([json.loads(line.recv(100000))["changed"] for _ in range(2)])
"""


def test_where_a_variable_was_set_stays_the_same_in_later_reports(tmp_path: Path) -> None:
    address = f"elastic-agent-tests-{os.getpid()}-{tmp_path.name}"
    ran = subprocess.run(
        [sys.executable, "-c", REPORTED_TWICE, address],
        env=clean_environment(),
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert ran.stdout == "[{'MY_CACHE': 'wave'}, {'MY_CACHE': 'wave'}]\n", ran.stderr
