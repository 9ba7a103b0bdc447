"""The output streams of a worker and their destinations: torchrun's terms (`Std`, `LogsDest`), without torch."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntFlag


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
