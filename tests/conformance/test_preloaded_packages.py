"""Each package that is preloaded: a worker that is handed it is like one that imports it, in every respect."""

from __future__ import annotations

import json
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from elastic_agent.workers.spawner.curated import SHOWN_FOR

from .launchers import BARE, COLD, WARM, Job, run_everywhere

pytestmark = pytest.mark.prove

Report = dict[str, Any]

FINDERS_OF_WORKERS = {"Preloaded", "_Finder"}


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, str], Report]:
    """Return what was found after the import, by launcher and package."""
    folder = tmp_path_factory.mktemp("packages")
    installed = [package for package in SHOWN_FOR if find_spec(package) is not None]
    installed.sort(key=lambda package: package not in ("numpy", "torch"))  # the others find these imported
    job = Job("packages.py", args=tuple(installed))
    outcomes = run_everywhere(job, folder, [BARE, WARM])
    for outcome in outcomes.values():
        worker = outcome.worker(0, 0)
        assert worker.code == 0, worker.stderr.decode()
        assert b"elastic-agent:" not in worker.stderr, worker.stderr.decode()
    return {
        (launcher.name, package): json.loads((folder / launcher.name / f"0-{package}.json").read_text())
        for launcher in (BARE, WARM)
        for package in installed
    }


@pytest.mark.parametrize("package", SHOWN_FOR)
def test_a_preloaded_package_is_as_if_the_worker_imported_it(
    reports: dict[tuple[str, str], Report], package: str
) -> None:
    if (WARM.name, package) not in reports:
        pytest.skip(f"{package} is not installed")
    seen, expected = reports[WARM.name, package], reports[BARE.name, package]
    assert "error" not in expected
    seen["finders"] = [name for name in seen["finders"] if name not in FINDERS_OF_WORKERS]
    _compare_modules(seen.pop("modules"), expected.pop("modules"))
    for found in (
        seen,
        expected,
    ):  # each package is imported for itself here, and those before it in the spawner
        found["warning filters"].sort()
    for item, value in expected.items():
        assert seen[item] == value, item


def _compare_modules(seen: Report, expected: Report) -> None:
    assert seen.keys() - expected.keys() == set(), "there are more modules"
    missing = {name for name in expected.keys() - seen.keys() if not name.startswith(IMPORTED_UNSEEN)}
    assert missing == set(), "modules are missing"
    for name in expected.keys() & seen.keys():
        if name.startswith(SHARED_BY_COMPILED_CODE):
            continue
        (*place, seen_origins, seen_names, _) = seen[name]
        (*expected_place, origins, expected_names, is_lazy) = expected[name]
        assert place == expected_place, name
        kept = {key: origin for key, origin in seen_origins.items() if key in origins and OWN not in origin}
        kept = {key: origin for key, origin in kept.items() if (name, key) != CALLED_ELSE}
        assert kept.items() <= origins.items(), f"{name} has functions or classes of other modules"
        if not is_lazy:
            assert {*expected_names} ^ {*seen_names} <= ADDED.get(name, set()), name


OWN = "/elastic_agent/integrations/"
"""Where the functions are defined by which the agent replaces some of the packages, in all its workers."""
CALLED_ELSE = ("lightning_fabric.utilities.warnings", "_default_format_warning")
"""What pytorch_lightning calls for warnings of others: the same function of lightning, if that came first."""
SHARED_BY_COMPILED_CODE = ("_cython_", "_cyutility", "cython_runtime")
"""Packages compiled by one version of Cython share modules, which are noted for the first of these packages only."""
IMPORTED_UNSEEN = ("threading", "_sysconfigdata_", *SHARED_BY_COMPILED_CODE)
"""Documented: numpy's compiled code imports the first; a function that keeps its result, the second."""
ADDED = {
    "PIL": {"PILLOW_VERSION"},
    "fsspec.asyn": {"lock"},
    "numpy": {"Inf"},
    "scipy._lib.array_api_compat.numpy": {"Inf"},
    "sklearn.externals.array_api_compat.numpy": {"Inf"},
}
"""Attributes that another package or a later call adds to a module: torchmetrics to PIL and numpy, of which scipy and
scikit-learn copy them."""


def test_a_module_that_was_computed_by_its_package_is_imported_by_the_worker(tmp_path: Path) -> None:
    """transformers executes itself a second time while it is imported, and both copies compute attributes."""
    pytest.importorskip("transformers")
    (tmp_path / "train.py").write_text(
        "import sys, transformers\n"
        "print('Trainer' in vars(transformers), 'transformers.trainer' in sys.modules)\n"
        "from transformers import Trainer\n"
        "print(Trainer is sys.modules['transformers.trainer'].Trainer, hasattr(Trainer.train, '__wrapped__'))\n"
    )
    outcomes = run_everywhere(Job("train.py", cwd=tmp_path), tmp_path, [COLD, WARM])
    for launcher in (COLD, WARM):
        worker = outcomes[launcher.name].worker(0, 0)
        assert worker.stdout.decode().split() == ["False", "False", "True", "True"], worker.stderr.decode()
