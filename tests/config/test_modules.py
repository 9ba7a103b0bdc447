"""``-m MODULE``: a package that is not there is found out before anything starts, and none that is there is refused."""

from __future__ import annotations

from pathlib import Path

import pytest

from elastic_agent.config.errors import UsageError
from elastic_agent.config.script import check_module

FILES = {
    "train.py": "",
    "package/__init__.py": "raise SystemExit('imported')",
    "package/__main__.py": "",
    "package/inner/__init__.py": "raise SystemExit('imported')",
    "package/inner/train.py": "",
    "namespace/inner/train.py": "",
}


@pytest.fixture(autouse=True)
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name, text in FILES.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text(text)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    "name",
    [
        "train",
        "package",
        "package.inner.train",
        "namespace.inner.train",
        "http.server",
        "os.path",
        "torch.distributed.run",
    ],
)
def test_modules_that_python_can_run_are_accepted(name: str) -> None:
    check_module(name)


@pytest.mark.parametrize(
    ("name", "wrong"),
    [
        ("trian", "was not found from"),
        ("pakage.inner.train", "was not found from"),
        (
            "train.py",
            "(specify the module without .py: -m train)",
        ),
        ("", "was not found from"),
        ("..", "was not found from"),
        (
            "package/inner/train.py",
            "is a path; expected the name of a module, with dots: -m package.inner.train, or the script without -m",
        ),
        ("./train.py", "with dots: -m train, or the script without -m"),
        ("package/inner", "with dots: -m package.inner, or the script without -m"),
        ("pakk\udce9ge", "was not found from"),
    ],
)
def test_modules_that_python_cannot_run_are_refused(name: str, wrong: str) -> None:
    with pytest.raises(UsageError, match=r"^module \".*\" [^\n]*$") as refused:
        check_module(name)
    assert wrong in str(refused.value)
