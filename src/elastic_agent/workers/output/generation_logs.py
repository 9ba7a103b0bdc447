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
from pathlib import Path

from elastic_agent import worker_variables as variables
from elastic_agent.workers.output.folders import LogFolders
from elastic_agent.workers.output.log_limit import LogLimit
from elastic_agent.workers.output.streams import Destinations, Streams

_CONSOLE = ""


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
        limit_bytes: What a file of a worker's redirected output may take; 0: there is no limit. The guard limits the
            file in which the console's output is kept.
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
        limit_bytes: int = 0,
        keep_runs: int | None = None,
    ) -> None:
        self._directory = _usable_directory(log_dir)
        self._redirected = redirects or {}
        self._teed = tee or {}
        self._shown = local_ranks_filter or None
        self._folders = LogFolders(self._directory, keep_generations, keep_runs)
        self._limit = LogLimit(limit_bytes) if limit_bytes else None

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
        node_directory = self._make_node_directory(envs[0])
        for slot, env in envs.items():
            (node_directory / str(slot)).mkdir()
            env["TORCHELASTIC_ERROR_FILE"] = str(node_directory / str(slot) / "error.json")
        stdouts, tee_stdouts = self._destinations(node_directory, len(envs), Streams.OUT, "stdout.log")
        stderrs, tee_stderrs = self._destinations(node_directory, len(envs), Streams.ERR, "stderr.log")
        dest = Destinations(
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
        if self._limit is not None:
            written = {
                *dest.stdouts.values(),
                *dest.stderrs.values(),
                dest.filtered_stdout,
                dest.filtered_stderr,
            }
            self._limit.watch(written - {_CONSOLE, os.devnull})
        return dest

    def close(self) -> None:
        """End, as no worker writes any more."""
        if self._limit is not None:
            self._limit.close()
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

    def _make_node_directory(self, env: Mapping[str, str]) -> Path:
        generation = int(env[variables.GENERATION])
        return self._folders.make(env[variables.RUN_ID], generation, env[variables.NODE_ID])


def _usable_directory(log_dir: str) -> str:
    if log_dir == os.devnull:
        return log_dir
    try:
        os.makedirs(log_dir, exist_ok=True)
    except FileExistsError:
        raise ValueError(f"the log directory {log_dir!r} is a file; expected a directory") from None
    except OSError as error:
        raise ValueError(f"cannot create the log directory {log_dir!r}: {error.strerror}") from error
    return os.path.abspath(log_dir)
