"""Where workers' output and error files go: a directory per generation, node and slot.

    <log_dir>/<run id>/<generation>/<node id>/<slot>/{stdout.log,stderr.log,error.json}
    <log_dir>/<run id>/<generation>/<node id>/filtered_{stdout,stderr}.log
    <log_dir>/<run id>/latest -> <generation>

torch names its folders by the restart count and erases one when a count comes again; here nothing of a
generation that is kept is ever erased. Nodes may share the directory.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import re
import shutil
import tempfile
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import quote

from torch.distributed.elastic.multiprocessing import LogsDest, LogsSpecs, Std, to_map

__all__ = ["GenerationLogs", "StdSetting", "file_safe", "parse_std"]

StdSetting = Std | dict[int, Std]

_LONGEST_NAME = 120
_CONSOLE = ""
_GENERATION_NAME = re.compile(r"\d{6,}")
_VALUES = "0 (console), 1 (stdout to a file), 2 (stderr to a file) or 3 (both)"

logger = logging.getLogger(__name__)


def parse_std(text: str) -> StdSetting:
    """The value of `--redirects` and `--tee`: one of 0 to 3 for every worker, or a mapping such as
    "0:3,11:1".

    Keys of a mapping are local ranks; those it leaves out have 0. Raises ValueError with one line for the
    user.
    """
    if re.fullmatch(r"[0-3]", text):
        return Std(int(text))
    mapping: dict[int, Std] = {}
    for part in text.split(","):
        match = re.fullmatch(r"(\d{1,6}):([0-3])", part.strip(), re.ASCII)
        if match is None:
            raise ValueError(
                f"{text!r} is neither {_VALUES} nor a mapping from local ranks to these, such as 0:3,11:1"
            )
        rank, value = int(match[1]), Std(int(match[2]))
        if rank in mapping:
            raise ValueError(f"{text!r} names local rank {rank} twice")
        mapping[rank] = value
    return mapping


def file_safe(name: str) -> str:
    """`name` as the name of one file: different names stay different, and ordinary ones stay as they are."""
    safe = quote(name, safe="").replace("~", "%7E")
    if not safe or safe.startswith("."):
        safe = "%2E" + safe[1:] if safe else "%"
    if len(safe) > _LONGEST_NAME:
        digest = hashlib.sha256(name.encode(errors="surrogateescape")).hexdigest()[:16]
        safe = f"{safe[: _LONGEST_NAME - 17]}~{digest}"
    return safe


class GenerationLogs(LogsSpecs):
    """Log destinations for the workers of this node, generation after generation.

    Args:
        log_dir: Where runs' directories are made; a new temporary directory when None. `os.devnull`: no
            files at all, error files included, whatever `redirects` and `tee` say.
        redirects: Streams that go to a file only, as in torchrun.
        tee: Streams that go to a file and to the console.
        local_ranks_filter: The local ranks whose output is shown; that of others goes to files only, or
            nowhere when it is not redirected. None or empty: all.
        keep_generations: How many generations' directories are kept for a run, this one included.

    Raises:
        ValueError: `log_dir` cannot be used, or `keep_generations` is below 1.
    """

    def __init__(
        self,
        log_dir: str | None = None,
        redirects: StdSetting = Std.NONE,
        tee: StdSetting = Std.NONE,
        local_ranks_filter: set[int] | None = None,
        keep_generations: int = 20,
    ) -> None:
        if keep_generations < 1:
            raise ValueError(f"keep_generations is {keep_generations}, but must be at least 1")
        self._is_temporary = log_dir is None
        self._directory = _usable_directory(log_dir)
        self._redirect_setting = redirects
        self._tee_setting = tee
        self._shown = local_ranks_filter or None
        self._keep_generations = keep_generations
        super().__init__(self._directory, redirects, tee, local_ranks_filter)

    @property
    def root_log_dir(self) -> str:
        return self._directory

    @property
    def discards_everything(self) -> bool:
        """Whether `log_dir` is `os.devnull`."""
        return self._directory == os.devnull

    def reify(self, envs: dict[int, dict[str, str]]) -> LogsDest:
        """Make the directories of a generation and say what goes where, by local rank.

        Takes run, node and generation from the workers' environment (ELASTIC_AGENT_*, else torchrun's
        variables) and adds TORCHELASTIC_ERROR_FILE to it. Raises OSError when a directory cannot be made.
        """
        if self.discards_everything:
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            console = dict.fromkeys(envs, _CONSOLE)
            nowhere = dict.fromkeys(envs, os.devnull)
            return LogsDest(console, dict(console), {}, {}, nowhere, os.devnull, os.devnull)
        node_directory = self._make_node_directory(envs[0] if envs else {})
        for slot, env in envs.items():
            (node_directory / str(slot)).mkdir()
            env["TORCHELASTIC_ERROR_FILE"] = str(node_directory / str(slot) / "error.json")
        stdouts, tee_stdouts = self._destinations(node_directory, len(envs), Std.OUT, "stdout.log")
        stderrs, tee_stderrs = self._destinations(node_directory, len(envs), Std.ERR, "stderr.log")
        return LogsDest(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=tee_stdouts,
            tee_stderrs=tee_stderrs,
            error_files={slot: env["TORCHELASTIC_ERROR_FILE"] for slot, env in envs.items()},
            filtered_stdout=str(node_directory / "filtered_stdout.log"),
            filtered_stderr=str(node_directory / "filtered_stderr.log"),
        )

    def remove_if_temporary(self) -> None:
        """Remove the temporary directory, if one was made; for a run that ended well."""
        if self._is_temporary:
            shutil.rmtree(self._directory, ignore_errors=True)

    def _destinations(
        self, node_directory: Path, slots: int, stream: Std, file_name: str
    ) -> tuple[dict[int, str], dict[int, str]]:
        """For one stream, by slot: where it goes, and which of those files are also shown on the console."""
        redirected = to_map(self._redirect_setting, slots)
        teed = to_map(self._tee_setting, slots)
        written: dict[int, str] = {}
        shown: dict[int, str] = {}
        for slot in range(slots):
            is_shown = self._shown is None or slot in self._shown
            if (redirected[slot] | teed[slot]) & stream:
                written[slot] = str(node_directory / str(slot) / file_name)
                if is_shown and teed[slot] & stream:
                    shown[slot] = written[slot]
            else:
                written[slot] = _CONSOLE if is_shown else os.devnull
        return written, shown

    def _make_node_directory(self, env: Mapping[str, str]) -> Path:
        run_id = env.get("ELASTIC_AGENT_RUN_ID") or env.get("TORCHELASTIC_RUN_ID") or "run"
        node_id = env.get("ELASTIC_AGENT_NODE_ID") or f"node{env.get('GROUP_RANK', '0')}"
        generation = int(env.get("ELASTIC_AGENT_GENERATION") or env.get("TORCHELASTIC_RESTART_COUNT") or 0)
        run_directory = Path(self._directory, file_safe(run_id))
        directory = run_directory / f"{generation:06d}" / file_safe(node_id)
        directory.parent.mkdir(parents=True, exist_ok=True)
        _make_anew(directory)
        _point_latest(run_directory, f"{generation:06d}", file_safe(node_id))
        _prune(run_directory, generation, self._keep_generations)
        return directory


def _usable_directory(log_dir: str | None) -> str:
    if log_dir is None:
        return tempfile.mkdtemp(prefix="elastic_agent_")
    if log_dir == os.devnull:
        return log_dir
    try:
        os.makedirs(log_dir, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"the log directory {log_dir!r} is a file; name a directory") from None
    except OSError as error:
        raise ValueError(f"the log directory {log_dir!r} cannot be made: {error.strerror}") from error
    return os.path.abspath(log_dir)


def _make_anew(directory: Path) -> None:
    """Make `directory`; one of an earlier run of the same name moves aside, to `NAME~1` and so on."""
    for number in range(1, 1000):
        try:
            directory.mkdir()
            return
        except FileExistsError:
            aside = directory.with_name(f"{directory.name}~{number}")
            if not aside.exists():
                directory.rename(aside)
    raise FileExistsError(f"{directory} exists, and so do 999 that moved aside for it")


def _point_latest(run_directory: Path, generation_name: str, unique: str) -> None:
    """Point `latest` at the newest generation; a convenience, so a file system without links does no harm."""
    temporary = run_directory / f".latest-{unique}"
    with contextlib.suppress(OSError):
        temporary.unlink(missing_ok=True)
        temporary.symlink_to(generation_name)
        temporary.replace(run_directory / "latest")


def _prune(run_directory: Path, generation: int, keep: int) -> None:
    """Remove the oldest generations below this one; later ones are an earlier run's of the same name."""
    names = [name for name in os.listdir(run_directory) if _GENERATION_NAME.fullmatch(name)]
    older = sorted((int(name), name) for name in names if int(name) < generation)
    for _, name in older[: max(0, len(older) - (keep - 1))]:
        # Another node may be removing the same one.
        shutil.rmtree(run_directory / name, ignore_errors=True)
