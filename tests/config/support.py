"""A shell with files and variables, for the tests of the settings."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from elastic_agent.config.load import Resolved, load_settings


class Shell:
    """A user's shell in a folder of its own: a home, a script that exists, and an environment."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.environ: dict[str, str] = {"HOME": str(folder), "PATH": "/usr/bin:/bin"}
        self.script = str(folder / "train.py")
        Path(self.script).write_text("print('hello')\n", encoding="utf-8")
        Path(self.script).chmod(0o755)

    def load(self, argv: Sequence[str] = (), variables: Mapping[str, str] | None = None) -> Resolved:
        """Return what ``elastic-agent ARGV train.py`` would run with."""
        return load_settings([*argv, self.script], {**self.environ, **(variables or {})})

    def write(self, name: str, text: str) -> str:
        """Write a file and return its path."""
        path = self.folder / name
        path.write_text(text, encoding="utf-8")
        return str(path)
