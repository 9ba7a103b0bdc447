"""Shows files of workers' output while they grow, in whole lines (``--tee``).

torch's reader shows what it finds: parts of two workers' lines in one line, halves of characters, and each update of a
progress bar as a line.
"""

from __future__ import annotations

import codecs
import locale
import logging
import math
import threading
import time
from collections.abc import Callable, Mapping
from queue import Empty, SimpleQueue
from typing import BinaryIO, TextIO

_UNFINISHED_S = 1.0
"""The time for which a line that grows or is overwritten waits for its end before it is shown as it is."""

_MOST_CHARACTERS = 16 * 1024 * 1024
"""A longer line is not waited for."""

_READ_BYTES = 1024 * 1024

logger = logging.getLogger(__name__)


class Tee:
    """Follows the files of some workers, in a thread of its own.

    Args:
        files: paths by local rank; they need not exist yet.
        destination: where lines are shown.
        header: begins each line of a worker, by local rank.
        is_shown: whether a line is shown.
        interval_s: how often the files are read.
    """

    def __init__(
        self,
        files: Mapping[int, str],
        destination: TextIO,
        header: Callable[[int], str],
        is_shown: Callable[[str], bool] = lambda line: True,
        interval_s: float = 0.1,
    ) -> None:
        self._destination = destination
        self._interval_s = interval_s
        self._is_shown = is_shown
        self._files = [Follower(path, header(local_rank), self._show) for local_rank, path in files.items()]
        self._requests: SimpleQueue[threading.Event] = SimpleQueue()
        self._ends = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Begin to follow."""
        if self._files:
            self._thread = threading.Thread(target=self._follow, name="tee", daemon=True)
            self._thread.start()

    def show_now(self) -> threading.Event:
        """Show what has been written by now, also of a line without end. Returns what is set when that is done."""
        shown = threading.Event()
        if self.is_running:
            self._requests.put(shown)
        else:
            shown.set()
        return shown

    @property
    def is_running(self) -> bool:
        """True if there is output to show."""
        return self._thread is not None and self._thread.is_alive()

    def stop(self) -> None:
        """Show the rest, and end."""
        self._ends.set()
        self.show_now()
        if self._thread is not None:
            self._thread.join()

    def _follow(self) -> None:
        try:
            ends = False
            while not ends:
                shown = self._next_request()
                ends = self._ends.is_set()  # what was written before is read once more
                for file in self._files:
                    file.advance(time.monotonic(), ends=ends or shown is not None)
                self._destination.flush()
                if shown is not None:
                    shown.set()
        except (OSError, ValueError) as error:  # the terminal or the disk is gone, or a stream is closed
            logger.warning(f"the output of workers is shown no longer: {error}")
        finally:
            for file in self._files:
                file.close()

    def _next_request(self) -> threading.Event | None:
        try:
            return self._requests.get(timeout=self._interval_s)
        except Empty:
            return None

    def _show(self, header: str, line: str) -> None:
        if self._is_shown(line):
            self._destination.write(f"{header}{line}\n")


class Follower:
    """One worker's output, from bytes to what is shown."""

    def __init__(self, path: str, header: str, show: Callable[[str, str], None]) -> None:
        self._path = path
        self._header = header
        self._show = show
        self._file: BinaryIO | None = None
        self.decoder = codecs.getincrementaldecoder(locale.getencoding())("replace")
        self._line = ""
        """The text after the last end of a line. If text before was overwritten, a carriage return stands for it."""
        self._shown = ""
        """The part of that line that has been shown."""
        self._due_s = math.inf

    def advance(self, now_s: float, *, ends: bool) -> None:
        """Show what the file has more by now; all of it if the output ``ends``."""
        while data := self._read():
            self._take(self.decoder.decode(data), now_s)
        if ends:
            self._take(self.decoder.decode(b"", final=True), now_s)
        if ends or now_s >= self._due_s:
            self._show_line(is_finished=False)

    def close(self) -> None:
        if self._file is not None:
            self._file.close()

    def _read(self) -> bytes:
        if self._file is None:
            try:
                self._file = open(self._path, "rb", buffering=0)  # noqa: SIM115
            except FileNotFoundError:  # not yet
                return b""
        return self._file.read(_READ_BYTES)

    def _take(self, text: str, now_s: float) -> None:
        *finished, rest = (self._line + text).split("\n")
        for self._line in finished:
            self._end_line()
        self._line = rest
        latest, is_overwritten = _latest(rest)
        if is_overwritten:
            self._line = "\r" + latest + ("\r" if rest.endswith("\r") else "")
        if len(rest) > _MOST_CHARACTERS:
            self._end_line()
        elif text and rest:
            self._due_s = min(self._due_s, now_s + _UNFINISHED_S)

    def _end_line(self) -> None:
        self._show_line(is_finished=True)
        self._line = self._shown = ""

    def _show_line(self, *, is_finished: bool) -> None:
        latest, is_overwritten = _latest(self._line)
        if is_overwritten:
            new = latest if latest.strip() and latest != self._shown else None
        else:
            new = latest.removeprefix(self._shown)
            new = new if new or (is_finished and not self._shown) else None
        if new is not None:
            self._show(self._header, new)
        self._shown = latest
        self._due_s = math.inf


def _latest(line: str) -> tuple[str, bool]:
    """Return what a terminal would show of a line, and whether it has overwritten other text."""
    _, overwritten, latest = line.rstrip("\r").rpartition("\r")
    return latest, bool(overwritten)
