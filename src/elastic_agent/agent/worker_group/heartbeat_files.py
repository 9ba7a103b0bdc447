"""The location of heartbeat files: in memory, or on a disk when the memory for such files is full."""

from __future__ import annotations

import contextlib
import os
import stat
import tempfile

from elastic_agent.client._cells import PREFIX, SLOT_BYTES, SUFFIX, HeartbeatFile, lock_as_agent
from elastic_agent.logs import get_logger

IN_MEMORY = "/dev/shm"


def make_heartbeat_file(slots: int, folder: str = IN_MEMORY) -> HeartbeatFile:
    """Make the file of a generation with so many workers, in ``folder`` or else the directory for temporary files.

    Raises:
        OSError: there is no room in either; the message names both.
    """
    try:
        return HeartbeatFile.create(folder, slots)
    except OSError as error:
        why = error.strerror
    try:
        other = tempfile.gettempdir()
        file = HeartbeatFile.create(other, slots)
    except OSError as error:
        raise OSError(
            f"cannot create a heartbeat file in {folder} ({why}) or in $TMPDIR "
            f"({error.strerror or error}); expected one of them to be writable with {slots * SLOT_BYTES} "
            f"bytes free: see df {folder}"
        ) from None
    get_logger().warning(
        f"using {other} for the heartbeat file because {folder} is not usable: {why}; torch's data "
        f"loaders and NCCL need {folder} too: see df {folder}"
    )
    return file


def sweep_heartbeat_files(folder: str = IN_MEMORY) -> None:
    """Remove what agents of this user that were killed have left. Never raises.

    An agent holds a lock on its file as long as it lives. Not to be called while this one has a file.
    """
    folders = {folder}
    with contextlib.suppress(OSError):
        folders.add(tempfile.gettempdir())
    for directory in folders:
        for path in _own_files(directory):
            with contextlib.suppress(OSError):
                _remove_if_abandoned(path)


def _own_files(folder: str) -> list[str]:
    found = []
    with contextlib.suppress(OSError), os.scandir(folder) as entries:
        for entry in entries:
            if entry.name.startswith(PREFIX) and entry.name.endswith(SUFFIX):
                with contextlib.suppress(OSError):
                    known = entry.stat(follow_symlinks=False)
                    if stat.S_ISREG(known.st_mode) and known.st_uid == os.geteuid():
                        found.append(entry.path)
    return found


def _remove_if_abandoned(path: str) -> None:
    fd = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        if lock_as_agent(fd):
            os.unlink(path)
    finally:
        os.close(fd)
