"""The versions of script and software on this node. The coordinator warns about nodes that differ."""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from elastic_agent import __version__
from elastic_agent.config.settings import Settings
from elastic_agent.protocol import Fingerprint

from .command import job_fingerprint


def fingerprint(settings: Settings) -> Fingerprint:
    """Script, Python, torch and package version of this node."""
    try:
        torch_version = version("torch")
    except PackageNotFoundError:
        torch_version = ""
    return Fingerprint(job_fingerprint(settings), platform.python_version(), torch_version, __version__)
