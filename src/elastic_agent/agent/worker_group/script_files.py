"""Where it is written down what was learned about a script. Imported before torch, so it imports little."""

from __future__ import annotations

import hashlib
import json
import os
import sys
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from elastic_agent.config.settings import Settings
from elastic_agent.worker_variables import PER_WORKER

from .script_scan import variables_set


@dataclass(frozen=True)
class ScriptFiles:
    """Where it is written down what was learned about a script."""

    reported: Path
    verdict: Path

    @classmethod
    def of(cls, settings: Settings, folder: str) -> ScriptFiles:
        """The files of this script under this interpreter; ``folder``: what ``sys.path[0]`` is in the workers."""
        is_module = settings.runs_module
        script = ["-m", settings.script, folder] if is_module else [os.path.realpath(settings.script)]
        key = json.dumps([*script, settings.python_exec or sys.executable, _installed_ns()])
        name = hashlib.sha256(os.fsencode(key)).hexdigest()[:32]
        place = settings.state_dir / "preload"
        return cls(place / f"{name}.reported.json", place / f"{name}.json")

    def source(self, *, learn: bool) -> dict[str, Any]:
        """What a spawner gets; ``learn``: it is to try what workers reported, else to use the last verdict."""
        return {
            "verdict": str(self.verdict),
            "reported": str(self.reported) if learn else "",
            "of_workers": [*PER_WORKER],
        }


def _installed_ns() -> int:
    """When torch was installed, in nanoseconds: tells environments of nodes apart that share a state directory."""
    spec = find_spec("torch")
    try:
        return os.stat(spec.origin).st_mtime_ns if spec is not None and spec.origin is not None else 0
    except OSError:
        return 0


def known_modules(settings: Settings, folder: str) -> dict[str, Any] | None:
    """What a spawner needs to preload the modules that earlier workers of the script imported, if that is known.

    Not if the script sets or removes a variable which such a module reads when it is imported, and the verdict does
    not take that into account: the script was changed.
    """
    if settings.no_learn_preload:
        return None
    files = ScriptFiles.of(settings, folder)
    reads = _names_in(files.verdict, "reads")
    if reads is None:
        return None
    is_module = settings.runs_module
    new = variables_set(settings.script, is_module=is_module, folder=folder) & reads
    return None if new - (_names_in(files.reported, "changed") or set()) else files.source(learn=False)


def _names_in(path: Path, key: str) -> set[str] | None:
    """The names in one object of a file; None: there is no such file, or it is damaged."""
    try:
        return set(json.loads(path.read_bytes())[key])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return None
