"""A cold worker adapts frameworks, and its script sees what it would see without that."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from elastic_agent.workers.guard.cold import with_startup_hook

SCRIPT = """
import json, os, subprocess, sys
child = [sys.executable, "-c", "import os; print(os.environ.get('PYTHONPATH'))"]
print(json.dumps({
    "PYTHONPATH": os.environ.get("PYTHONPATH"),
    "path": sys.path,
    "argv": sys.argv,
    "child": subprocess.run(child, capture_output=True, text=True).stdout.strip(),
    "customized": getattr(sys, "customized", 0),
    "searched": [path for path in sys.path_importer_cache if "startup_hook" in path],
    "finders": [type(finder).__module__ for finder in sys.meta_path],
}))
"""
OURS = "elastic_agent.integrations.post_import"


def seen(script: Path, env: dict[str, str]) -> dict[str, object]:
    ran = subprocess.run([sys.executable, str(script), "a", "b"], env=env, capture_output=True, text=True)
    assert (ran.returncode, ran.stderr) == (0, "")
    found: dict[str, object] = json.loads(ran.stdout)
    return found


@pytest.fixture
def script(tmp_path: Path) -> Path:
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    return script


@pytest.fixture
def env() -> dict[str, str]:
    env = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    return {**env, "ELASTIC_AGENT_GENERATION": "1"}


@pytest.mark.parametrize("path", [None, "{tmp}", "{tmp}:/nowhere"])
@pytest.mark.parametrize("customizes", [True, False])
def test_the_startup_hook_leaves_only_the_integrations_behind(
    script: Path, env: dict[str, str], tmp_path: Path, path: str | None, customizes: bool
) -> None:
    folder = tmp_path / "of the user"
    folder.mkdir()
    if customizes:
        (folder / "sitecustomize.py").write_text(
            "import sys\nsys.customized = getattr(sys, 'customized', 0) + 1\n"
        )
    if path is not None:
        env["PYTHONPATH"] = path.format(tmp=folder)
    plain, hooked = seen(script, env), seen(script, with_startup_hook(env))
    assert hooked["customized"] == (1 if customizes and path is not None else 0)
    hooked_finders, plain_finders = hooked.pop("finders"), plain.pop("finders")
    assert hooked_finders == [OURS, *plain_finders]  # type: ignore[misc]
    assert hooked == plain


def test_an_error_in_the_users_sitecustomize_is_reported_as_without_the_hook(
    script: Path, env: dict[str, str], tmp_path: Path
) -> None:
    (tmp_path / "sitecustomize.py").write_text("import no_such_module\n")
    env["PYTHONPATH"] = str(tmp_path)
    errors = [
        subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True).stderr
        for environment in (env, with_startup_hook(env))
    ]
    assert "No module named 'no_such_module'" in errors[0]
    assert errors[1].splitlines()[-1] == errors[0].splitlines()[-1]


def test_a_python_without_this_package_starts_as_usual(env: dict[str, str]) -> None:
    hooked = with_startup_hook(env)
    hook = hooked["PYTHONPATH"]
    program = f"import site, sys; sys.path.insert(0, {hook!r}); site.execsitecustomize(); print(1)"
    without_site_packages = [sys.executable, "-S", "-c", program]
    ran = subprocess.run(without_site_packages, env=hooked, capture_output=True, text=True)
    assert (ran.stdout, ran.stderr) == ("1\n", "")
