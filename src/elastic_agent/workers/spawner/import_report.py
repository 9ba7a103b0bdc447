"""Has a worker report to its agent which modules the script has imported, so that later workers find them preloaded.

No thread and no code of the script's is involved: a POSIX timer sends this process `REPORT_SIGNAL`, at first every
second, later more rarely, and Python runs the handler between two instructions of the main thread. While modules are
still being imported it only counts them. A report is also sent when the script ends.
"""

from __future__ import annotations

import contextlib
import ctypes
import json
import os
import signal
import socket
import sys
from collections.abc import Mapping

from elastic_agent.workers.spawner.installed import is_installed

REPORT_SIGNAL = signal.SIGURG
"""Without a handler, after a script has reset all signals or while the interpreter ends, it does nothing. Go uses it
for the same reason."""

_FIRST_PAUSE_S = 1.0
_LONGEST_PAUSE_S = 64.0
_PATIENCE = 10
"""So many pauses in a row may pass with further imports before there is a report in between."""
_NAMES_PER_MESSAGE = 1000
_CLOCK_MONOTONIC = 1
_SIGEV_SIGNAL = 0


class _SignalEvent(ctypes.Structure):
    """`struct sigevent`."""

    _fields_ = (
        ("value", ctypes.c_void_p),
        ("signo", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("rest", ctypes.c_char * 48),
    )


class _Times(ctypes.Structure):
    """`struct itimerspec`."""

    _fields_ = tuple((name, ctypes.c_long) for name in ("interval_s", "interval_ns", "value_s", "value_ns"))


class ImportReports:
    """The reports of this worker, from here to its end."""

    def __init__(self, address: str, slot: int, changed: Mapping[str, int]) -> None:
        """`address`: the agent's socket, in the abstract namespace. `changed`: of `watch_changes`; it is read later."""
        self._address = "\0" + address
        self._slot = slot
        self._changed = changed
        self._variables = dict(os.environ)  # as the script begins
        self._known = set(sys.modules)
        self._pid = os.getpid()
        self._counted = 0
        self._waited = 0
        self._pause_s = _FIRST_PAUSE_S
        self._timer = ctypes.c_void_p()
        self._has_timer = False
        self._libc = ctypes.CDLL(None, use_errno=True)

    def start(self) -> None:
        """Report from now on, where the system has such timers; else at the end only."""
        self._counted = len(sys.modules)
        if signal.getsignal(REPORT_SIGNAL) != signal.SIG_DFL:  # a preloaded module uses it
            return
        event = _SignalEvent(None, REPORT_SIGNAL, _SIGEV_SIGNAL)
        try:
            failed = self._libc.timer_create(_CLOCK_MONOTONIC, ctypes.byref(event), ctypes.byref(self._timer))
        except AttributeError:  # glibc before 2.34 has it in another library
            return
        if not failed:
            self._has_timer = True
            signal.signal(REPORT_SIGNAL, self._tick)
            signal.siginterrupt(REPORT_SIGNAL, False)
            self._set_timer()

    def _set_timer(self) -> None:
        times = _Times(0, 0, int(self._pause_s), 0)
        self._libc.timer_settime(self._timer, 0, ctypes.byref(times), None)

    def _tick(self, signum: int, frame: object) -> None:
        if os.getpid() != self._pid:
            return
        try:
            count = len(sys.modules)
            self._waited += 1
            if count == self._counted or self._waited >= _PATIENCE:
                self._waited = 0
                self._report()
                self._pause_s *= 2
            self._counted = count
            if self._pause_s <= _LONGEST_PAUSE_S:
                self._set_timer()
        except Exception:  # never the script's problem
            pass

    def finish(self) -> None:
        """The script has ended."""
        if os.getpid() == self._pid:
            with contextlib.suppress(Exception):  # never the script's problem
                if self._has_timer:
                    self._libc.timer_delete(self._timer)
                self._report()

    def _report(self) -> None:
        """Send what is new. What cannot be sent now is sent with the next report."""
        names: list[str] = []
        modules = list(sys.modules.items())
        for name, module in modules:
            if name not in self._known and is_installed(name, module):
                names.append(name)
        last_before = {
            variable: next(
                (one for one, module in reversed(modules[:count]) if is_installed(one, module)), ""
            )
            for variable, count in self._changed.items()
        }
        last_before.update(dict.fromkeys(self._variables.keys() - os.environ.keys(), ""))
        if not names and not last_before:
            return
        with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as line:
            line.setblocking(False)
            for first in range(0, max(1, len(names)), _NAMES_PER_MESSAGE):
                some = names[first : first + _NAMES_PER_MESSAGE]
                message = {"slot": self._slot, "names": some, "changed": last_before}
                line.sendto(json.dumps(message).encode(), self._address)
                self._known.update(some)
