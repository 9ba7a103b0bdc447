"""The folders that a script runs in under chaos: new ones, so that it overwrites no file of the user."""

from __future__ import annotations

import os
import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

PLACEHOLDER = "{checkpoints}"
"""In the arguments of a script: the folder for checkpoints."""


@dataclass
class Workspace:
    """Folders of one run of a script."""

    folder: Path
    """Holds all others; is made."""
    script: Sequence[str]
    """The script and its arguments as the user gave them."""
    checkpoints: Path | None = None
    """The folder that the script saves to, relative to its working folder or absolute."""
    separate: bool = False
    """Each node has a working folder of its own."""
    origin: Path = field(default_factory=Path.cwd)
    """The folder whose content the working folders have."""

    def __post_init__(self) -> None:
        self.kept = self.folder / "checkpoints"
        self.kept.mkdir(parents=True)

    @property
    def checkpoint_folder(self) -> Path:
        """The folder for checkpoints; shared by all nodes."""
        own = self.checkpoints
        return own.resolve() if own is not None and own.is_absolute() else self.kept

    @property
    def shared(self) -> list[Path]:
        """Folders that all nodes see."""
        return [self.checkpoint_folder, *([] if self.separate else [self.folder / "work"])]

    @property
    def local(self) -> list[Path]:
        """Folders that one node sees."""
        return [self.folder / "cluster" / "machines", *([self.folder / "work"] if self.separate else [])]

    def command(self) -> list[str]:
        """Return the script with its absolute path, and its arguments."""
        command = [word.replace(PLACEHOLDER, str(self.checkpoint_folder)) for word in self.script]
        if command[0] != "-m":
            command[0] = os.path.abspath(command[0])
        return command

    def working_folder(self, node: str) -> Path:
        """Return the node's: a copy of the files of the current folder and links to the folders in it."""
        work = self.folder / "work" / (node if self.separate else "all")
        if not work.exists():
            work.mkdir(parents=True)
            own = self.checkpoints if self.checkpoints and not self.checkpoints.is_absolute() else None
            for entry in os.scandir(self.origin):
                source, target = Path(entry.path), work / entry.name
                if (own and own.parts[0] == entry.name) or self.folder.is_relative_to(source):
                    continue
                if entry.is_dir():
                    target.symlink_to(source)
                elif entry.is_file():
                    shutil.copy2(source, target)
            if own:
                (work / own).parent.mkdir(parents=True, exist_ok=True)
                (work / own).symlink_to(self.kept)
        return work

    def close(self) -> None:
        """Leave an absolute folder for checkpoints as empty as it was, for the next run."""
        if self.checkpoint_folder != self.kept and self.checkpoint_folder.is_dir():
            for entry in self.checkpoint_folder.iterdir():
                shutil.move(entry, self.kept / entry.name)
