"""The folders of workers' output: made, found by `latest` links, removed when there are too many.

    <log_dir>/<run id>/<generation>/<node id>/
    <log_dir>/<run id>/latest -> <generation>      the one that was started last
    <log_dir>/latest -> <run id>                   the one that was started last

Several nodes may share the directory on a network file system, so each step must be correct also if others take it
at the same time.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import re
import shutil
import threading
from collections.abc import Callable
from pathlib import Path
from typing import ParamSpec
from urllib.parse import quote

from elastic_agent.files import all_but_newest, locked, modified_s

P = ParamSpec("P")

_LONGEST_NAME = 120
_GENERATION_NAME = re.compile(r"\d{6,}")
_LATEST = "latest"
_UNNAMED = ".unnamed-run"
"""A file in the folder of a run without --rdzv-id. Its agents hold a shared lock on it as long as they live."""


def file_safe(name: str) -> str:
    """Return `name` as the name of one file: different names stay different, and ordinary ones stay as they are."""
    safe = quote(name, safe="").replace("~", "%7E")
    if not safe or safe.startswith("."):
        safe = "%2E" + safe[1:] if safe else "%"
    if len(safe) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
        safe = f"{safe[: _LONGEST_NAME - 17]}~{digest}"
    return safe


def run_folder(log_dir: str, run_id: str) -> Path:
    """Return the folder of a run; one that is called "latest" must not be taken for the link."""
    return Path(log_dir, "%6Catest" if run_id == _LATEST else file_safe(run_id))


KEPT_RUNS = 200
"""The number of runs that are kept, the newest: their status and their node-id locks, and in the default log directory
the output of those without --rdzv-id."""


class LogFolders:
    """Makes the folders of one node's generations.

    Args:
        log_dir: The folder of the runs' folders; it exists.
        keep_generations: The number of generations of a run that are kept, the newest included.
        keep_runs: The number of runs without --rdzv-id that are kept; this is one of them. None: this run or the
            directory was named, and no run's folder is removed.
    """

    def __init__(self, log_dir: str, keep_generations: int, keep_runs: int | None = None) -> None:
        self._log_dir = log_dir
        self._keep_generations = keep_generations
        self._keep_runs = keep_runs
        self._claimed = False
        self._unused: Path | None = None
        """The folder of workers that have no world yet."""
        self._marker: int | None = None

    def make(self, run_id: str, generation: int, node_id: str, *, apart: bool = False) -> Path:
        """Make the new folder of this node, without what others have left in it. Raises OSError.

        ``apart``: for workers that have no world yet; they go on in it if that is the world of this generation.
        """
        run_directory = run_folder(self._log_dir, run_id)
        directory = run_directory / f"{generation:06d}" / file_safe(node_id)
        directory.parent.mkdir(parents=True, exist_ok=True)
        if not self._claimed:
            self._claimed = True
            self._claim(run_directory, directory.name)
        if apart or directory != self._unused:
            _make_anew(directory)
        self._unused = directory if apart else None
        _link(run_directory / _LATEST, f"{generation:06d}", directory.name)
        _in_thread(prune_generations, run_directory, generation, directory.name, self._keep_generations)
        return directory

    def close(self) -> None:
        """Release the run's folder: it may be removed from now on."""
        if self._marker is not None:
            os.close(self._marker)
            self._marker = None

    def _claim(self, run_directory: Path, node_name: str) -> None:
        """Claim the run at the first generation of this node: it is the latest now, and not to be removed."""
        _link(Path(self._log_dir, _LATEST), run_directory.name, f"{run_directory.name}-{node_name}")
        marker = run_directory / _UNNAMED
        if self._keep_runs is None:
            with contextlib.suppress(OSError):
                marker.unlink()
            return
        with contextlib.suppress(OSError):
            self._marker = os.open(marker, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o644)
            os.utime(self._marker)  # its position among the newest
            fcntl.flock(self._marker, fcntl.LOCK_SH | fcntl.LOCK_NB)
        _in_thread(prune_runs, self._log_dir, self._keep_runs)


def _make_anew(directory: Path) -> None:
    """Make `directory`; one of an earlier run of the same name is renamed to `NAME~1` and so on."""
    for number in range(1, 1000):
        try:
            directory.mkdir()
            return
        except FileExistsError:
            aside = directory.with_name(f"{directory.name}~{number}")
            if not aside.exists():
                directory.rename(aside)
    raise FileExistsError(f"{directory} exists, and so do the 999 names that it could be moved to")


def _link(link: Path, target: str, unique: str) -> None:
    """Point `link` at `target` in one step; a convenience, so a file system without links does no harm."""
    temporary = link.with_name(f".latest-{unique}")
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(target)
        temporary.replace(link)


def _in_thread(prune: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
    """Call it in a thread: folders of many files take their time, and the agent's loop, which renews the lease, must
    not wait for it."""

    def work() -> None:
        with contextlib.suppress(OSError):
            prune(*args, **kwargs)

    threading.Thread(target=work, name="prune-logs", daemon=True).start()


def prune_generations(run_directory: Path, generation: int, node_name: str, keep: int) -> None:
    """Remove this node's folders of all but the newest generations up to this one; raises OSError.

    Each node removes its own, so that hundreds of them do not take the same folders apart at once. What a node that
    has left the run cannot remove any more stays until there are twice as many folders. Generations above this one
    are an earlier run's of the same name.
    """
    names = [name for name in os.listdir(run_directory) if _GENERATION_NAME.fullmatch(name)]
    older = [name for number, name in sorted((int(name), name) for name in names) if number < generation]
    for name in _all_but_last(older, keep - 1):
        with contextlib.suppress(OSError):
            for node in os.listdir(run_directory / name):
                if node == node_name or re.fullmatch(re.escape(node_name) + r"~\d+", node):
                    shutil.rmtree(run_directory / name / node, ignore_errors=True)
            (run_directory / name).rmdir()  # fails if other nodes have folders there
    for name in _all_but_last(older, 2 * keep - 1):
        shutil.rmtree(run_directory / name, ignore_errors=True)


def _all_but_last(names: list[str], keep: int) -> list[str]:
    return names[: max(0, len(names) - keep)]


def prune_runs(log_dir: str, keep: int) -> None:
    """Remove the folders of runs without --rdzv-id and without a live agent, except the newest `keep`."""
    markers: list[Path] = []
    with contextlib.suppress(OSError), os.scandir(log_dir) as entries:
        markers = [Path(entry.path, _UNNAMED) for entry in entries if entry.is_dir(follow_symlinks=False)]
    for marked_at, marker in all_but_newest(markers, keep):
        with contextlib.suppress(OSError), locked(marker):
            if modified_s(marker) == marked_at:  # else an agent came meanwhile
                shutil.rmtree(marker.parent, ignore_errors=True)
