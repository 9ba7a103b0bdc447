"""The places of workers' output and error files: a directory per generation, node and slot.

    <log_dir>/<run id>/<generation>/<node id>/<slot>/{output.log,stdout.log,stderr.log,error.json}
    <log_dir>/<run id>/<generation>/<node id>/filtered_{stdout,stderr}.log
    <log_dir>/<run id>/latest -> <generation>
    <log_dir>/latest -> <run id>

torch names its folders by the restart count and erases one when a count comes again; here nothing of a
generation that is kept is ever erased. Nodes may share the directory.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntFlag
from pathlib import Path

from elastic_agent import worker_variables as variables
from elastic_agent.workers.output.folders import LogFolders

_CONSOLE = ""


class Streams(IntFlag):
    """Standard streams of a worker; the numbers are those of `--redirects` and `--tee`."""

    NONE = 0
    OUT = 1
    ERR = 2
    ALL = 3


@dataclass(frozen=True)
class Destinations:
    """The destinations of the output of the workers of one generation, by local rank, as in torch's `LogsDest`.

    A path "" is the console. `tee_stdouts` and `tee_stderrs` are those of the files that the console shows, too. What
    goes to the console, or would if it were shown, is also `kept` in these files.
    """

    stdouts: dict[int, str]
    stderrs: dict[int, str]
    tee_stdouts: dict[int, str]
    tee_stderrs: dict[int, str]
    error_files: dict[int, str]
    filtered_stdout: str
    filtered_stderr: str
    kept: dict[int, str]


class GenerationLogs:
    """Log destinations for the workers of this node, generation after generation.

    Args:
        log_dir: Where runs' directories are made. `os.devnull`: no files at all, error files included,
            for any `redirects` and `tee`.
        redirects: Streams that go to a file only, by local rank, as in torchrun; of ranks without an entry: none.
        tee: Streams that go to a file and to the console, likewise.
        local_ranks_filter: The local ranks whose output is shown; that of others goes to files only, or
            nowhere when it is not redirected. None or empty: all.
        keep_generations: How many generations' directories are kept for a run, this one included.
        keep_runs: How many directories of runs without --rdzv-id are kept; None: all, as this run was named.

    Raises:
        ValueError: `log_dir` cannot be used.
    """

    def __init__(
        self,
        log_dir: str,
        redirects: Mapping[int, Streams] | None = None,
        tee: Mapping[int, Streams] | None = None,
        local_ranks_filter: set[int] | None = None,
        keep_generations: int = 20,
        *,
        keep_runs: int | None = None,
    ) -> None:
        self._directory = _usable_directory(log_dir)
        self._redirected = redirects or {}
        self._teed = tee or {}
        self._shown = local_ranks_filter or None
        self._folders = LogFolders(self._directory, keep_generations, keep_runs)

    @property
    def root_log_dir(self) -> str:
        return self._directory

    def reify(self, envs: dict[int, dict[str, str]]) -> Destinations:
        """Make the directories of a generation; returns the destination of each stream, by local rank.

        Takes run, node and generation from the workers' environment and adds TORCHELASTIC_ERROR_FILE to it. Raises
        OSError when a directory cannot be made.
        """
        if self._directory == os.devnull:
            for env in envs.values():
                env["TORCHELASTIC_ERROR_FILE"] = ""
            console = dict.fromkeys(envs, _CONSOLE)
            nowhere = dict.fromkeys(envs, os.devnull)
            return Destinations(console, dict(console), {}, {}, nowhere, os.devnull, os.devnull, {})
        run_id, node_id = envs[0][variables.RUN_ID], envs[0][variables.NODE_ID]
        apart = envs[0].get(variables.PARKING) == variables.APART
        generation = int(envs[0][variables.GENERATION])
        node_directory = self._folders.make(run_id, generation, node_id, apart=apart)
        for slot, env in envs.items():
            (node_directory / str(slot)).mkdir(exist_ok=True)
            env["TORCHELASTIC_ERROR_FILE"] = str(node_directory / str(slot) / "error.json")
        stdouts, tee_stdouts = self._destinations(node_directory, len(envs), Streams.OUT, "stdout.log")
        stderrs, tee_stderrs = self._destinations(node_directory, len(envs), Streams.ERR, "stderr.log")
        return Destinations(
            stdouts=stdouts,
            stderrs=stderrs,
            tee_stdouts=tee_stdouts,
            tee_stderrs=tee_stderrs,
            error_files={slot: env["TORCHELASTIC_ERROR_FILE"] for slot, env in envs.items()},
            filtered_stdout=str(node_directory / "filtered_stdout.log"),
            filtered_stderr=str(node_directory / "filtered_stderr.log"),
            kept={
                slot: str(node_directory / str(slot) / "output.log")
                for slot in envs
                if {stdouts[slot], stderrs[slot]} & {_CONSOLE, os.devnull}
            },
        )

    def close(self) -> None:
        """End, as no worker writes any more."""
        self._folders.close()

    def _destinations(
        self, node_directory: Path, slots: int, stream: Streams, file_name: str
    ) -> tuple[dict[int, str], dict[int, str]]:
        """Return, for one stream and by slot, where it goes, and which of those files are also shown on the console."""
        written: dict[int, str] = {}
        shown: dict[int, str] = {}
        for slot in range(slots):
            is_shown = self._shown is None or slot in self._shown
            teed = self._teed.get(slot, Streams.NONE)
            if (self._redirected.get(slot, Streams.NONE) | teed) & stream:
                written[slot] = str(node_directory / str(slot) / file_name)
                if is_shown and teed & stream:
                    shown[slot] = written[slot]
            else:
                written[slot] = _CONSOLE if is_shown else os.devnull
        return written, shown


def _usable_directory(log_dir: str) -> str:
    if log_dir == os.devnull:
        return log_dir
    try:
        os.makedirs(log_dir, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"the log directory {log_dir!r} is a file") from None
    except OSError as error:
        raise ValueError(f"cannot create the log directory {log_dir!r}: {error.strerror}") from error
    return os.path.abspath(log_dir)
