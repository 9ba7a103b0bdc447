"""Warm workers under agents that were started in different ways."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest

from tests.agent import support
from tests.agent.support import COMMAND

REPORT = """
import json, os, sys
from pathlib import Path
facts = {
    "fds": sorted(int(fd) for fd in os.listdir("/proc/self/fd")),
    "path": sys.path[0],
    "warm": any(type(finder).__name__ == "Preloaded" for finder in sys.meta_path),
    "parent": Path(f"/proc/{os.getppid()}/comm").read_text().strip(),
}
Path(sys.argv[1]).write_text(json.dumps(facts))
"""


def finish(folder: Path, source: str, *options: str, **how: Any) -> subprocess.CompletedProcess[str]:
    """Run a script to its end, which must be a good one; its workers are warm unless told otherwise."""
    done = support.run(folder, source, *options, variables={"ELASTIC_AGENT_WORKER_START": "warm"}, **how)
    assert done.returncode == 0, done.stderr
    return done


def run(folder: Path, *options: str, **how: Any) -> dict[str, Any]:
    """Start an agent whose worker reports what it sees; its report, and what the agent said."""
    report = folder / "report.json"
    done = finish(folder, REPORT, *options, arguments=[str(report)], **how)
    return {**json.loads(report.read_text()), "said": done.stderr}


@pytest.mark.parametrize(
    "command",
    [
        pytest.param(COMMAND, id="module"),
        pytest.param(
            (str(Path(sys.executable).with_name("elastic-agent")),), id="command", marks=pytest.mark.prove
        ),
        pytest.param(
            (sys.executable, "-X", "utf8", "-m", "elastic_agent"),  # the spawner is no fork of this agent
            id="other flags",
            marks=pytest.mark.prove,
        ),
    ],
)
def test_workers_are_warm_however_the_agent_was_started(tmp_path: Path, command: tuple[str, ...]) -> None:
    if not os.path.exists(command[0]):
        pytest.skip("the command is not installed beside this Python")
    with open(os.devnull) as of_the_agent:
        seen = run(tmp_path, command=command, pass_fds=(of_the_agent.fileno(),))
    assert seen["warm"], seen["said"]
    assert seen["parent"] == "elastic-guard"
    assert seen["fds"] == [0, 1, 2, 3]  # 3: the listing itself
    assert seen["path"] == str(tmp_path)


def test_a_failing_preload_is_reported_with_its_traceback(tmp_path: Path) -> None:
    (tmp_path / "my_model.py").write_text("raise LookupError('no weights')")
    seen = run(tmp_path, "--preload", "my_model")
    assert not seen["warm"]
    assert "LookupError: no weights" in seen["said"]
    assert "workers start cold" in seen["said"]


SET_TOO_LATE = """
import os, settle, torch
print(type(torch.jit.script(torch.nn.Linear(1, 1))).__name__, flush=True)
if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    raise ValueError("the next attempt")
"""


def test_where_a_warm_worker_is_not_what_a_cold_one_would_be_the_next_ones_start_cold(tmp_path: Path) -> None:
    (tmp_path / "settle.py").write_text("import os\nos.environ['PYTORCH_JIT'] = '0'\n")
    done = finish(tmp_path, SET_TOO_LATE, "--max-restarts", "1")
    assert done.stdout.split() == ["RecursiveScriptModule", "Linear"]
    assert done.stderr.count("PYTORCH_JIT was changed after torch was preloaded, which has no effect") == 1
    assert (
        done.stderr.count("workers start cold, which takes longer: a line in the output of warm ones says")
        == 1
    )


REPLACES_A_FUNCTION = """
import sys, torch
def seed(number):
    pass
torch.manual_seed = seed
torch.optim.SGD([torch.nn.Parameter(torch.ones(1))])
is_warm = any(type(finder).__name__ == "Preloaded" for finder in sys.meta_path)
print(is_warm, "torch._dynamo" in sys.modules, torch.manual_seed is seed, flush=True)
"""


def test_what_a_script_has_replaced_in_torch_stays_where_a_preloaded_module_replaces_it_too(
    tmp_path: Path,
) -> None:
    done = finish(tmp_path, REPLACES_A_FUNCTION)
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


STANDS_FOR_ITSELF = """
import sys, types
from colorsys import rgb_to_hls as CAPTURED
sys.modules[__name__] = types.SimpleNamespace(CAPTURED=CAPTURED)
"""
REPLACES_WHAT_MODULES_IMPORT = """
import colorsys, sys
colorsys.rgb_to_hls = print
import archived, stands_for_itself
is_warm = any(type(finder).__name__ == "Preloaded" for finder in sys.meta_path)
print(is_warm, archived.CAPTURED is print, stands_for_itself.CAPTURED is print, flush=True)
"""


def test_modules_of_archives_and_without_a_spec_import_what_a_script_has_replaced(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with zipfile.ZipFile(tmp_path / "packed.zip", "w") as archive:
        archive.writestr("archived.py", "from colorsys import rgb_to_hls as CAPTURED\n")
    (tmp_path / "stands_for_itself.py").write_text(STANDS_FOR_ITSELF)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path / "packed.zip"), prepend=os.pathsep)
    done = finish(tmp_path, REPLACES_WHAT_MODULES_IMPORT, "--preload", "archived,stands_for_itself")
    assert done.stdout.split() == ["True", "True", "True"], done.stderr


@pytest.mark.parametrize("has_all", [True, False])
def test_workers_are_warm_with_releases_of_packages_that_lack_a_generator(
    tmp_path: Path, has_all: bool
) -> None:
    package = tmp_path / "sympy" / "core"
    package.mkdir(parents=True)
    for folder in (package.parent, package):
        (folder / "__init__.py").write_text("")
    others = "_assumptions_rng = random.Random()\n" if has_all else ""
    (package / "random.py").write_text(f"import random\nrng = random.Random()\n{others}")
    seen = run(tmp_path, "--preload", "sympy.core.random")
    assert seen["warm"], seen["said"]


@pytest.mark.prove
def test_a_preload_that_does_not_exist_is_named_in_one_line(tmp_path: Path) -> None:
    seen = run(tmp_path, "--preload", "torch.nowhere")
    assert not seen["warm"]
    assert "--preload torch.nowhere: there is no module torch.nowhere, neither in " in seen["said"]
    assert "Traceback" not in seen["said"]


def test_preloaded_modules_are_available_at_once(tmp_path: Path) -> None:
    """What they print is not left in a buffer, which each worker would flush."""
    (tmp_path / "my_model.py").write_text("print('loaded')")
    script = "import my_model\nprint('trained', flush=True)"
    done = finish(tmp_path, script, "--preload", "my_model", "--nproc-per-node", "3")
    assert done.stdout.count("trained") == 3
    assert done.stdout.count("loaded") == 1


DIES = """
import os, signal
from pathlib import Path

spawner, marker = os.getpid(), Path(__file__).with_name("died")

def children(pid):
    return Path(f"/proc/{pid}/task/{pid}/children").read_text().split()

def has_forked_again():
    (between,) = children(spawner)
    return children(between) or Path(f"/proc/{between}/stat").read_text().rpartition(")")[2].split()[0] == "Z"

def die():
    is_ready = Path("/proc/self/cmdline").read_bytes().startswith(b"elastic-spawner")
    if os.getpid() == spawner and is_ready and not marker.exists():
        while WAITS and not has_forked_again():
            pass
        marker.touch()
        os.kill(spawner, signal.SIGKILL)

os.register_at_fork(after_in_parent=die)
"""


@pytest.mark.parametrize("waits", [False, True], ids=["first fork", "second fork"])
def test_a_spawner_that_dies_while_it_forks_leaves_no_traceback(tmp_path: Path, waits: bool) -> None:
    """As when it is replaced because it has not forked all workers in time."""
    (tmp_path / "dies.py").write_text(f"WAITS = {waits}\n{DIES}")
    seen = run(tmp_path, "--preload", "dies", "--start-timeout", "100")
    assert seen["warm"], seen["said"]
    assert "the spawner died (signal 9)" in seen["said"]
    assert "Traceback" not in seen["said"]
