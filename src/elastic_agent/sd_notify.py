"""The line to systemd of a process that it runs as a service of ``Type=notify``."""

from __future__ import annotations

import contextlib
import math
import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass

from elastic_agent.printable import escaped

READY = "READY=1"
STOPPING = "STOPPING=1"
ALIVE = "WATCHDOG=1"


def status(text: str) -> str:
    """Return the line that ``systemctl status`` shows; only one is kept."""
    return f"STATUS={escaped(' '.join(text.split()))}"


def extend(time_s: float) -> str:
    """Return the line that says that start or stop may take this much longer, from now."""
    return f"EXTEND_TIMEOUT_USEC={round(time_s * 1e6)}"


@dataclass(frozen=True)
class SystemdNotifier:
    """The service manager to notify, if there is one."""

    address: str = ""
    """A socket's path, or its name outside the file system after an ``@``; empty: there is no listener."""
    watchdog_s: float | None = None
    """The interval in which it must receive ``ALIVE``; None: it has no watchdog."""

    @classmethod
    def taken_from(cls, environ: MutableMapping[str, str]) -> SystemdNotifier:
        """Take it from systemd's variables, which are removed, so that no child notifies in this process's name."""
        address = environ.pop("NOTIFY_SOCKET", "")
        watchdog_us = environ.pop("WATCHDOG_USEC", "")
        watched = environ.pop("WATCHDOG_PID", "") in ("", str(os.getpid()))
        if not address.startswith(("/", "@")):
            return cls()
        has_watchdog = watched and watchdog_us.isdecimal() and int(watchdog_us) > 0
        return cls(address, int(watchdog_us) / 1e6 if has_watchdog else None)

    @property
    def alive_every_s(self) -> float:
        """The pause between two ``ALIVE``, with room for being late."""
        return self.watchdog_s / 4 if self.watchdog_s is not None else math.inf

    @property
    def listens(self) -> bool:
        """True if there is a service manager to notify."""
        return bool(self.address)

    def notify(self, *lines: str, patience_s: float = 0.0) -> bool:
        """Send these lines within ``patience_s``. False if that was not possible, or if there is no listener."""
        if not self.listens:
            return False
        address = f"\0{self.address[1:]}" if self.address.startswith("@") else self.address
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
            sock.settimeout(patience_s)
            sock.sendto("\n".join(lines).encode(errors="backslashreplace"), address)
            return True
        return False
