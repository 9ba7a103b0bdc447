"""Whatever Python can run as a script, a launcher runs alike: folders, archives, links, odd names, mistakes."""

from __future__ import annotations

import py_compile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from .launchers import BARE, GUARDED_WARM, LAUNCHERS, WARM, Job, Launcher, Outcome, run_everywhere

TELLS = """\
import os, sys
main = sys.modules["__main__"]
print([__name__, __file__, __package__, __spec__ and __spec__.name, type(__loader__).__name__, __doc__])
print(sys.argv, sys.orig_argv, sys.path, os.getcwd(), vars(main) is globals(), sorted(vars(main)))
"""
# Its end is not what differs here (test_endings.py); that of a process which has torch takes half a second.
FAILS = f"{TELLS}import atexit; atexit.register(os._exit, 1)\nraise ValueError('in line 6')  # a comment\n"


@dataclass(frozen=True)
class Kind:
    """A kind of script: the files it consists of and how it is called."""

    call: str
    files: Mapping[str, str | bytes] = field(default_factory=dict)
    prepare: Callable[[Path], object] = lambda folder: None
    module: bool = False
    variables: dict[str, str] = field(default_factory=dict)

    def put_into(self, folder: Path) -> None:
        folder.mkdir(parents=True, exist_ok=True)
        for path, content in self.files.items():
            (folder / path).parent.mkdir(parents=True, exist_ok=True)
            (folder / path).write_bytes(content if isinstance(content, bytes) else content.encode())
        self.prepare(folder)


def zip_up(folder: Path) -> None:
    with zipfile.ZipFile(folder / "app.zip", "w") as archive:
        archive.writestr("__main__.py", "import inside\n" + FAILS)
        archive.writestr("inside.py", "print('inside', __file__)\n")


def compile_it(folder: Path) -> None:
    py_compile.compile(str(folder / "train.py"), cfile=str(folder / "compiled.pyc"), doraise=True)
    (folder / "train.py").unlink()


# What is not there at all is no kind of script: the agent refuses it before it starts anything.
KINDS = {
    "a script": Kind("train.py", {"train.py": FAILS}),
    "a script in a folder below": Kind("./below/../below/train.py", {"below/train.py": FAILS}),
    "a script with blanks and other letters in its name": Kind("für –  x.py", {"für –  x.py": FAILS}),
    "a link to a script": Kind(
        "links/train.py",
        {"real/train.py": "import beside\n" + FAILS, "real/beside.py": "", "links/x": ""},
        lambda folder: (folder / "links" / "train.py").symlink_to("../real/train.py"),
    ),
    "a folder with __main__.py": Kind(
        "app", {"app/__main__.py": "import beside\n" + FAILS, "app/beside.py": "print(__file__)\n"}
    ),
    "an archive": Kind("app.zip", {}, zip_up),
    "a compiled script": Kind("compiled.pyc", {"train.py": FAILS}, compile_it),
    "a script in Latin-1": Kind(
        "train.py",
        {"train.py": f"# -*- coding: latin-1 -*-\nprint('ü', len('ü'))\n{FAILS}".encode("latin-1")},
    ),
    "a script with a docstring and future features": Kind(
        "train.py",
        {"train.py": f'"""Trains."""\nfrom __future__ import annotations\nx: Missing = 1\n{FAILS}'},
    ),
    "a script with an error of syntax": Kind("train.py", {"train.py": "x = 1\nif x\n    print('ü')\n"}),
    "a script that is no UTF-8": Kind("train.py", {"train.py": b"x = 1\ny = '\xff'\n"}),
    "a script that warns when compiled": Kind("train.py", {"train.py": "x = 1\nx is 1\nprint('\\d')\n"}),
    "modules that are called like others' own": Kind(
        "train.py",
        {
            "train.py": "import utils, config, models, data, spawner, workers, agent\n" + FAILS,
            **{
                f"{name}.py": "print(__name__, __file__)\n"
                for name in ("utils", "config", "models", "data", "spawner", "workers", "agent")
            },
        },
    ),
    "a script on a safe path": Kind("train.py", {"train.py": FAILS}, variables={"PYTHONSAFEPATH": "1"}),
    "a module": Kind(
        "package.train",
        {
            "package/__init__.py": "print('package', __file__)\n",
            "package/train.py": "from . import x\n" + FAILS,
        }
        | {"package/x.py": "print(__name__)\n"},
        module=True,
    ),
    "a package with __main__.py": Kind(
        "runs", {"runs/__init__.py": "", "runs/__main__.py": FAILS}, module=True
    ),
    "a module whose package raises": Kind(
        "raises.train", {"raises/__init__.py": "1 / 0\n", "raises/train.py": ""}, module=True
    ),
}

ALSO_COLD = ("a script", "a folder with __main__.py", "a module")
"""A cold worker is Python itself, so that a few kinds tell; each costs a launch."""


def ways(kind: str) -> list[Launcher]:
    return LAUNCHERS if kind in ALSO_COLD else [WARM]


ARGUMENTS = ("", "-u", "ü")


def test_scripts_of_one_spawner_run_as_under_plain_python(tmp_path: Path) -> None:
    """All but those that an agent starts cold, or with other variables. A script has a folder for itself."""
    here = tmp_path / "here"
    commands: dict[str, list[str]] = {}
    for number, (name, kind) in enumerate(KINDS.items()):
        if kind.module:
            kind.put_into(here)
            commands[name] = ["-m", kind.call, *ARGUMENTS]
        elif not kind.variables and not kind.call.endswith(".pyc"):
            kind.put_into(here / f"{number}")
            commands[name] = [f"{number}/{kind.call}", *ARGUMENTS]
    job = Job("0/train.py", cwd=here, slots=len(commands), commands=[*commands.values()])
    outcomes = run_everywhere(job, tmp_path, [BARE, GUARDED_WARM])
    for slot, name in enumerate(commands):
        seen, expected = (shown(outcomes[launcher.name], slot) for launcher in (GUARDED_WARM, BARE))
        assert seen == expected, f"{name}:\n{seen}\nunder python -u:\n{expected}"


@pytest.mark.prove
@pytest.mark.parametrize("name", [*ALSO_COLD, "a compiled script", "a script on a safe path"])
def test_scripts_run_as_under_plain_python(name: str, tmp_path: Path) -> None:
    kind, here = KINDS[name], tmp_path / "here"
    kind.put_into(here)
    job = Job(kind.call, ARGUMENTS, kind.module, cwd=here, variables=kind.variables)
    outcomes = run_everywhere(job, tmp_path, [BARE, *ways(name)])
    expected = shown(outcomes[BARE.name])
    for launcher in ways(name):
        seen = shown(outcomes[launcher.name])
        assert seen == expected, f"{name}, {launcher.name}:\n{seen}\nunder python -u:\n{expected}"


def shown(outcome: Outcome, slot: int = 0) -> str:
    worker = outcome.worker(0, slot)
    out, err = (output.decode(errors="backslashreplace") for output in (worker.stdout, worker.stderr))
    return f"code {worker.code}\nstdout: {out}\nstderr: {err}"
