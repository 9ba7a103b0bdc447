"""The environment in which a worker that is not forked adapts frameworks, as a forked one does. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

STARTUP_HOOK = os.path.join(os.path.dirname(os.path.abspath(__file__)), "startup_hook")
"""The folder of a `sitecustomize`, which every Python imports when it starts and finds it (the module `site`)."""


def with_startup_hook(env: Mapping[str, str]) -> dict[str, str]:
    """The environment for a program that is executed. The hook removes itself from it again before the script runs."""
    path = env.get("PYTHONPATH")
    return {**env, "PYTHONPATH": f"{STARTUP_HOOK}{os.pathsep}{path}" if path else STARTUP_HOOK}
