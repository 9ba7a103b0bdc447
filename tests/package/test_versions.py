"""`make` installs one version of each package, which constraints.txt pins."""

from __future__ import annotations

import re
import tomllib
from importlib.metadata import distributions
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())


def pinned_versions() -> dict[str, str]:
    lines = re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)
    found = {canonicalize_name(name): version for name, version in lines}
    assert len(found) == len(lines), "a package is pinned twice"
    return found


def direct_requirements() -> list[Requirement]:
    """Return what pyproject.toml asks for, in all groups that `make` installs and for the build."""
    extras = PROJECT["project"]["optional-dependencies"]
    installed = (ROOT / "tools" / "make-venv").read_text().partition("'.[")[2].partition("]'")[0].split(",")
    assert set(installed) == extras.keys() - {"gpu"}
    groups = [PROJECT["build-system"]["requires"], PROJECT["project"]["dependencies"]]
    return [
        Requirement(line) for group in [*groups, *(extras[extra] for extra in installed)] for line in group
    ]


def needed_packages(roots: list[Requirement]) -> set[str]:
    """Return the names of the packages that these need in this environment, directly and indirectly."""
    requires = {canonicalize_name(package.name): package.requires or [] for package in distributions()}
    found: set[tuple[str, str]] = set()
    ahead = [(canonicalize_name(root.name), extra) for root in roots for extra in ("", *root.extras)]
    while ahead:
        package, extra = ahead.pop()
        if (package, extra) in found:
            continue
        found.add((package, extra))
        for requirement in map(Requirement, requires[package]):
            if requirement.marker is None or requirement.marker.evaluate({"extra": extra}):
                name = canonicalize_name(requirement.name)
                ahead += [(name, wanted) for wanted in ("", *requirement.extras)]
    return {package for package, _ in found}


def test_the_pinned_versions_are_those_that_pyproject_toml_asks_for() -> None:
    pinned = pinned_versions()
    for requirement in direct_requirements():
        assert requirement.specifier.contains(pinned[canonicalize_name(requirement.name)]), requirement


def test_every_package_that_make_installs_is_pinned() -> None:
    # torch's CUDA builds pin their own libraries, those of each version of torch.
    libraries = ("nvidia-", "cuda-", "triton")
    missing = needed_packages(direct_requirements()) - pinned_versions().keys()
    assert not {name for name in missing if not name.startswith(libraries)}
