"""Writes the locks, from pyproject.toml and constraints.txt: see locks/README.md. Run by `make lock`."""

from __future__ import annotations

import argparse
import hashlib
import re
import subprocess
import sys
import tempfile
import tomllib
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCKS = ROOT / "locks"
EXTRAS = ("test", "dev", "examples", "frameworks")  # as tools/make-venv installs them
# hatchling needs editables for `pip install --editable`; packages that have no wheel need setuptools.
BACK_ENDS = ("editables", "setuptools")
ENTRY = re.compile(r"^(?P<name>[A-Za-z0-9._-]+)==(?P<version>[^\s;]+).*(?:\n    .*)*\n", re.M)
HASH = re.compile(r"sha256:[0-9a-f]{64}")
# What uv adds to every line for tool.uv.environments in pyproject.toml.
EVERYWHERE = " ; python_full_version < '3.15' and sys_platform == 'linux'"
HEADER = "# Written by `make lock`; do not edit. See README.md in this folder.\n"


def normalized(name: str) -> str:
    """The name of a package as the index spells it."""
    return re.sub(r"[-_.]+", "-", name).lower()


def entries(text: str) -> dict[str, str]:
    """The lines of each package."""
    return {normalized(entry["name"]): entry[0] for entry in ENTRY.finditer(text)}


def resolved(uv: Path, requirements: str | None, *, extras: tuple[str, ...] = ()) -> dict[str, str]:
    """The packages for `requirements`, or for this package with `extras`, with the hashes of all their files."""
    command: list[str | Path] = [uv, "pip", "compile", "--quiet", "--universal", "--generate-hashes"]
    command += [
        "--python-version",
        "3.11",
        "--constraints",
        "constraints.txt",
        "--no-header",
        "--no-annotate",
    ]
    command += [f"--extra={extra}" for extra in extras]
    command += ["pyproject.toml" if requirements is None else "-"]
    done = subprocess.run(
        command, cwd=ROOT, input=requirements, text=True, stdout=subprocess.PIPE, check=False
    )
    if done.returncode:
        sys.exit(done.returncode)
    return entries(done.stdout.replace(f"{EVERYWHERE} \\\n", " \\\n"))


def write(name: str, packages: dict[str, str], comment: str = "") -> None:
    (LOCKS / name).write_text(HEADER + comment + "".join(packages[package] for package in sorted(packages)))


def lock_packages(uv: Path) -> None:
    constraints = (ROOT / "constraints.txt").read_text()
    pinned = {normalized(name) for name in re.findall(r"^([\w.-]+)==", constraints, re.M)}
    runtime = resolved(uv, None)
    # What only torch's CUDA builds need depends on torch's version; constraints.txt does not list it.
    packages = {
        name: entry
        for name, entry in resolved(uv, None, extras=EXTRAS).items()
        if name != "torch" and (name in pinned or name not in runtime)
    }
    pyproject = tomllib.loads((ROOT / "pyproject.toml").read_text())
    build = resolved(uv, "\n".join([*pyproject["build-system"]["requires"], *BACK_ENDS]))
    if unpinned := sorted((packages.keys() | build.keys()) - pinned):
        sys.exit(f"constraints.txt has no version of: {', '.join(unpinned)}; add it, then repeat make lock")
    write("runtime.txt", runtime)
    write("packages.txt", packages)
    write("build.txt", build)
    write("tools.txt", resolved(uv, (LOCKS / "tools.in").read_text()))


def lock_torch_for_cpus() -> None:
    """Adds the hash of the build that pip finds for this Python, and keeps the others of the same version."""
    version = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    assert version is not None
    pin = f"torch=={version[1]}+cpu"
    path = LOCKS / "torch-cpu.txt"
    text = path.read_text() if path.exists() else ""
    hashes = set(HASH.findall(text)) if f"\n{pin} " in text else set()
    with tempfile.TemporaryDirectory() as folder:
        download = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", folder, pin]
        if subprocess.run(download, check=False).returncode:
            print(f"lock: pip does not find {pin}; its hash was not added", file=sys.stderr)
        for file in Path(folder).iterdir():
            with file.open("rb") as wheel:
                hashes.add(f"sha256:{hashlib.file_digest(wheel, 'sha256').hexdigest()}")
    lines = [pin, *(f"--hash={one}" for one in sorted(hashes))]
    write(
        "torch-cpu.txt",
        {"torch": " \\\n    ".join(lines) + "\n"},
        "# One hash for each Python and architecture.\n",
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--uv", type=Path, required=True)
    lock_packages(parser.parse_args().uv)
    lock_torch_for_cpus()


if __name__ == "__main__":
    main()
