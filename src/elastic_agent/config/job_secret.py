"""The secret of a Slurm job: a file in the state directory that its nodes share (``--secret-source slurm``).

The agent on the first node of a step creates the file, the others read it. They never create one: if the directory is
not shared, they wait in vain and say so, instead of having a secret each. A requeued job finds the file of its last
life. Agents of several steps may create it at the same time: one hard link wins, and every agent reads that one.
"""

from __future__ import annotations

import contextlib
import errno
import os
import re
import stat
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from elastic_agent.config.errors import UsageError
from elastic_agent.config.run_secret import new_secret, parsed_secret, read_private
from elastic_agent.config.sources.slurm import is_step, job_name, step_hosts
from elastic_agent.files import create_atomically, modified_s

FOLDER = "secrets"
"""In the state directory."""

KEPT_S = 30 * 24 * 3600.0
"""Files that no agent has read for so long are removed when another one is created."""

LEAST_PAUSE_S, MOST_PAUSE_S = 0.1, 2.0
"""How often to look for the file, ever more rarely: a network file system has no events, and many nodes may wait."""

SILENT_S = 2.0
"""After how long to say that it is awaited."""

_SOURCE = "--secret-source slurm"
_UNSAFE = re.compile(r"[^A-Za-z0-9._-]")
_LONGEST = 100


class NoSecretError(Exception):
    """The secret is not where it is expected, although time was given; the message is one line."""


@dataclass(frozen=True)
class JobSecret:
    """The secret of the job that this agent is a task of."""

    file: Path
    creates: bool
    """Whether this agent creates the file if there is none."""
    first_host: str
    """The node whose agent does."""

    @staticmethod
    def of_step(state_dir: Path, environ: Mapping[str, str]) -> JobSecret:
        """That of the step in whose environment this process is. Raises ``UsageError``: it is in none."""
        if not is_step(environ):
            raise UsageError(
                f"{_SOURCE}: SLURM_JOB_ID and SLURM_STEP_ID are not set; expected a step of a Slurm job: start the "
                "agents with srun, or pass --secret-file"
            )
        names = (
            environ.get("SLURM_CLUSTER_NAME", ""),
            job_name(environ),
        )  # clusters may share home directories
        file = ".".join(_UNSAFE.sub("-", name)[:_LONGEST] for name in names if name)
        hosts = step_hosts(environ)
        return JobSecret(
            state_dir / FOLDER / f"job-{file}",
            creates=environ.get("SLURM_PROCID") == "0",
            first_host=hosts[0] if hosts else "the first node",
        )

    def wait(self, timeout_s: float, say: Callable[[str], object]) -> tuple[bytes, ...]:
        """Read the secret, and create it first if that is this agent's part. Blocks.

        Args:
            timeout_s: for how long to wait for the agent that creates it.
            say: is told if that takes long.

        Raises:
            UsageError: the file cannot be created or read, others can read it, or it is no secret.
            NoSecretError: it did not appear in time.
        """
        begun_s = time.monotonic()
        said = False
        while (found := self.look()) is None:
            waited_s = time.monotonic() - begun_s
            if waited_s >= timeout_s:
                raise NoSecretError(
                    f"{_SOURCE}: the agent on {self.first_host} did not create {self.file} within {timeout_s:g} s, as "
                    "seen from this node; expected a state directory that all nodes of the job share: set --state-dir, "
                    "or use another --secret-source"
                )
            if waited_s >= SILENT_S and not said:
                said = True
                say(
                    f"waiting for the agent on {self.first_host} to create the secret of this job, {self.file}"
                )
            time.sleep(min(LEAST_PAUSE_S + waited_s / 4, MOST_PAUSE_S))
        return found

    def look(self) -> tuple[bytes, ...] | None:
        """The secret, or None if there is none yet; errors as for :meth:`wait`."""
        found = self._read()
        if found is None and self.creates:
            self._create()
            found = self._read()  # another agent's, if that was quicker
        return found

    @property
    def _shown(self) -> str:
        return f"{_SOURCE}, file {self.file}"

    def _read(self) -> tuple[bytes, ...] | None:
        try:
            for folder in (self.file.parent.parent, self.file.parent):
                _look_again(folder)
            _check_folder(self.file.parent)
            data = read_private(self.file, self._shown, flags=os.O_NOFOLLOW)
        except OSError as error:
            if error.errno in (errno.ENOENT, errno.ESTALE):
                return None
            raise UsageError(
                f"{self._shown}: {error.strerror}; expected a regular file that this user can read"
            ) from None
        with contextlib.suppress(OSError):
            os.utime(self.file, follow_symlinks=False)
        return parsed_secret(data, self._shown)

    def _create(self) -> None:
        folder = self.file.parent
        try:
            folder.parent.mkdir(parents=True, exist_ok=True)
            folder.mkdir(mode=0o700, exist_ok=True)
            _check_folder(folder)
            _remove_old(folder)
            create_atomically(self.file, f"{new_secret()}\n".encode())
        except OSError as error:
            raise UsageError(
                f"{self._shown}: it cannot be created: {error.strerror}; expected a state directory that this user can "
                "write and that has hard links: set --state-dir, or pass --secret-file"
            ) from None


def _look_again(folder: Path) -> None:
    """Have an NFS client ask the server whether the directory has changed: what was missing may be there now."""
    with contextlib.suppress(OSError):
        os.close(os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC))


def _check_folder(folder: Path) -> None:
    """Others cannot put a file there. Raises ``UsageError`` and ``OSError``."""
    found = os.lstat(folder)
    if not stat.S_ISDIR(found.st_mode):
        raise UsageError(
            f"{_SOURCE}, directory {folder}: not a directory; expected one, or nothing: remove it"
        )
    if found.st_uid not in (os.geteuid(), 0):
        raise UsageError(
            f"{_SOURCE}, directory {folder}: it belongs to user {found.st_uid}; expected this user ({os.geteuid()}): "
            "remove it, or set another --state-dir"
        )
    if found.st_mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise UsageError(
            f"{_SOURCE}, directory {folder}: other users can write it (mode {stat.S_IMODE(found.st_mode):04o}); "
            f"expected 0700: chmod 700 {folder}"
        )


def _remove_old(folder: Path) -> None:
    """Files of jobs that are over, as far as their age shows it, and what an agent that was killed left behind."""
    oldest_s = time.time() - KEPT_S
    for file in folder.iterdir():
        with contextlib.suppress(OSError):
            if modified_s(file) < oldest_s:
                file.unlink()
