"""What `make` installs has one version and known hashes: the locks are those of pyproject.toml and constraints.txt."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.markers import default_environment
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

import elastic_agent

ROOT = Path(__file__).parents[2]
LOCKS = ROOT / "locks"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
FROM_INDEX = ("runtime.txt", "packages.txt", "build.txt", "tools.txt")
SHA256 = re.compile(r"--hash=sha256:[0-9a-f]{64}")
STAND_IN = """\
#!{python}
# Writes what cyclonedx-py would, for the list that is its last argument.
import json, re, sys, tomllib
arguments = sys.argv[1:]
after = lambda name: arguments[arguments.index(name) + 1]
project = tomllib.load(open(after("--pyproject"), "rb"))["project"]
found = list(enumerate(re.findall(r"^([a-z][^ ;=]*)==([^ ;]+)", open(arguments[-1]).read(), re.M)))
json.dump({{
    "metadata": {{"component": {{"bom-ref": "root-component", "version": project["version"]}}}},
    "components": [
        {{"bom-ref": f"L{{i}}", "name": name, "purl": f"pkg:pypi/{{name}}@{{version}}", "description": ""}}
        for i, (name, version) in found
    ],
    "dependencies": [{{"ref": "root-component"}}, *({{"ref": f"L{{i}}"}} for i, _ in found)],
}}, open(after("--output-file"), "w"))
"""


def requirements(name: str) -> list[tuple[Requirement, int]]:
    """What a file of requirements names, each with its number of hashes."""
    lines = (LOCKS / name).read_text().replace("\\\n", " ").splitlines()
    packages = [line for line in lines if line and not line.startswith("#")]
    return [(Requirement(SHA256.sub("", line).strip()), len(SHA256.findall(line))) for line in packages]


def versions(name: str) -> dict[str, str]:
    found = {}
    for requirement, _ in requirements(name):
        (only,) = requirement.specifier
        assert only.operator == "=="
        found[canonicalize_name(requirement.name)] = only.version
    return found


def constraints() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    return {canonicalize_name(name): version for name, version in lines}


@pytest.mark.parametrize("name", [*FROM_INDEX, "torch-cpu.txt"])
def test_every_package_has_one_version_and_hashes(name: str) -> None:
    assert versions(name)
    assert not [str(requirement) for requirement, hashes in requirements(name) if not hashes]


def test_the_locks_have_the_versions_that_constraints_txt_pins() -> None:
    pinned = constraints()
    for name in FROM_INDEX:
        locked = versions(name)
        assert {package: pinned.get(package, version) for package, version in locked.items()} == locked, name
    assert versions("torch-cpu.txt") == {"torch": f"{pinned['torch']}+cpu"}
    # What torch's CUDA builds need in addition is pinned by the lock only.
    assert versions("packages.txt").keys() | versions("build.txt").keys() | {"torch"} == pinned.keys()
    assert versions("runtime.txt").keys() - pinned.keys() <= {
        name for name in versions("runtime.txt") if name.startswith(("nvidia-", "cuda-", "triton"))
    }


def test_the_locks_have_what_pyproject_toml_asks_for() -> None:
    extras = PROJECT["project"]["optional-dependencies"]
    installed = (ROOT / "tools" / "make-venv").read_text().partition("'.[")[2].partition("]'")[0].split(",")
    assert set(installed) == extras.keys() - {"gpu"}
    everything = [one for extra in installed for one in extras[extra]]
    for wanted, locks in (
        (PROJECT["project"]["dependencies"], ("runtime.txt",)),
        (PROJECT["project"]["dependencies"] + everything, ("packages.txt", "torch-cpu.txt")),
        (PROJECT["build-system"]["requires"], ("build.txt",)),
        ((LOCKS / "tools.in").read_text().splitlines(), ("tools.txt",)),
    ):
        locked = {package: version for name in locks for package, version in versions(name).items()}
        for requirement in map(Requirement, wanted):
            assert requirement.specifier.contains(locked[canonicalize_name(requirement.name)]), requirement


def test_the_locks_hold_for_every_supported_version_of_python_on_linux() -> None:
    for minor in range(11, 15):
        for machine in ("x86_64", "aarch64"):
            there = {
                **default_environment(),
                "python_version": f"3.{minor}",
                "python_full_version": f"3.{minor}.0",
                "platform_machine": machine,
            }
            packages = [
                one
                for one, _ in requirements("packages.txt")
                if one.marker and not one.marker.evaluate(there)
            ]
            assert not packages


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="a wheel is built from a commit: this is no clone")
def test_two_builds_of_the_wheel_are_identical() -> None:
    check = subprocess.run(
        [ROOT / "tools" / "check-wheel", sys.executable],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert check.returncode == 0, check.stderr
    assert re.fullmatch(r"[0-9a-f]{64}  elastic_agent-\S+-py3-none-any\.whl\n", check.stdout)


def test_the_bill_of_materials_has_this_version_and_tells_direct_from_indirect(tmp_path: Path) -> None:
    tool, output = tmp_path / "cyclonedx-py", tmp_path / "new" / "sbom.json"
    tool.write_text(STAND_IN.format(python=sys.executable))
    tool.chmod(0o755)
    command = [sys.executable, ROOT / "tools" / "sbom.py", "--tool", tool, "--output", output]
    subprocess.run(command, timeout=30, check=True)
    sbom = json.loads(output.read_text())
    assert sbom["metadata"]["component"]["version"] == elastic_agent.__version__
    (root,) = (one for one in sbom["dependencies"] if one["ref"] == sbom["metadata"]["component"]["bom-ref"])
    names = {Requirement(one).name for one in PROJECT["project"]["dependencies"]}
    locked = versions("runtime.txt")
    assert root["dependsOn"] == sorted(f"pkg:pypi/{name}@{locked[name]}" for name in names)
    assert {one["bom-ref"] for one in sbom["components"]} == {
        f"pkg:pypi/{name}@{version}" for name, version in locked.items()
    }
