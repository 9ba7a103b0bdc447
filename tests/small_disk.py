"""Commands that see a disk of a few kilobytes somewhere."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path

import pytest

from tests.cli.support import clean_environment

WITH_DISK = """
mount -t tmpfs -o size="$1",mode=1777 tmpfs "$0" || exit
shift
exec "$@"
"""


def run_on_small_disk(
    folder: Path, size: str, command: Sequence[str], **variables: str
) -> subprocess.CompletedProcess[str]:
    """Run a command to its end for which an empty disk of this size is at ``folder``; elsewhere nothing changes."""
    done = subprocess.run(
        ["unshare", "--mount", "--map-root-user", "sh", "-c", WITH_DISK, str(folder), size, *command],
        env=clean_environment(variables),
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    if done.stderr.startswith(("unshare:", "mount:")):
        pytest.skip(f"no mount namespaces here: {done.stderr.strip()}")
    return done
