"""The first use of the state directory, and the error if it cannot be used."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

from elastic_agent.config.errors import UsageError

from .identity import acquire_node_id


@contextlib.contextmanager
def using_state_dir(state_dir: Path) -> Iterator[None]:
    """Report errors of what uses the state directory, and no other, as a wrong ``--state-dir``."""
    try:
        yield
    except OSError as error:
        where = f" {error.filename}:" if error.filename is not None else ""
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        wanted = "free space there, or pass another one" if is_full else "expected a writable directory"
        raise UsageError(f"--state-dir {state_dir} is not usable:{where} {error.strerror}", wanted) from None


def try_state_dir(state_dir: Path) -> None:
    """Take a node id of no run there, and remove what that made; raises ``UsageError``."""
    folder = state_dir / "nodes" / f"=try-{os.getpid()}"
    made = [path for path in (folder, *folder.parents) if not path.exists()]
    try:
        with using_state_dir(state_dir):
            lock = acquire_node_id(folder, "n")
            try:
                lock.record("", [])
            finally:
                lock.release()
    finally:
        with contextlib.suppress(OSError):
            (folder / "n.lock").unlink(missing_ok=True)
            for path in made:
                path.rmdir()
