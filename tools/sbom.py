"""Writes the software bill of materials, as CycloneDX JSON. Run by `make sbom`; needs no network.

It lists what locks/runtime.txt holds, with the hashes of all files of each version.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]


def normalized(name: str) -> str:
    """The name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def with_version(pyproject: str) -> str:
    """The project's metadata with the version, which the build back end otherwise reads from the package."""
    package = (ROOT / "src" / "elastic_agent" / "__init__.py").read_text()
    version = re.search(r'^__version__ = "(\S+)"$', package, re.M)
    assert version is not None
    return pyproject.replace('dynamic = ["version"]', f'version = "{version[1]}"')


def direct_dependencies(pyproject: str) -> set[str]:
    """The names of the packages that the project itself needs."""
    needed = tomllib.loads(pyproject)["project"]["dependencies"]
    return {normalized(re.split(r"[^\w.-]", requirement)[0]) for requirement in needed}


def write_sbom(tool: Path, output: Path) -> None:
    pyproject = (ROOT / "pyproject.toml").read_text()
    with tempfile.TemporaryDirectory() as folder:
        project = Path(folder, "pyproject.toml")
        project.write_text(with_version(pyproject))
        command: list[str | Path] = [tool, "requirements", "--pyproject", project, "--output-reproducible"]
        command += ["--output-file", output, "locks/runtime.txt"]
        # The tool warns that the project has no dependencies: it reads a list, in which nothing says which the project
        # itself names. They are added below.
        quiet = {**os.environ, "PYTHONWARNINGS": "ignore::UserWarning"}
        subprocess.run(command, cwd=ROOT, check=True, env=quiet)
    sbom = json.loads(output.read_text())
    names = {"root-component": "root-component"}
    direct = []
    for component in sbom["components"]:
        del component["description"]  # its lines of the list
        names[component["bom-ref"]] = component["bom-ref"] = component["purl"]
        if normalized(component["name"]) in direct_dependencies(pyproject):
            direct.append(component["purl"])
    sbom["dependencies"] = [{"ref": names[one["ref"]]} for one in sbom["dependencies"]]
    root = next(one for one in sbom["dependencies"] if one["ref"] == "root-component")
    root["dependsOn"] = sorted(direct)
    output.write_text(json.dumps(sbom, indent=2) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--tool", type=Path, required=True, help="cyclonedx-py")
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    options.output.parent.mkdir(parents=True, exist_ok=True)
    write_sbom(options.tool.absolute(), options.output.absolute())


if __name__ == "__main__":
    main()
