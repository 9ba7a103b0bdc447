"""Tells installations of this package apart: until there are releases, all have the same version."""

from __future__ import annotations

import hashlib
from importlib.metadata import PackageNotFoundError, files

from elastic_agent import __version__


def installed_version() -> str:
    """Return the version, with a digest of the installed modules; without it where the sources themselves are used."""
    try:
        listed = files("elastic-agent") or []
    except PackageNotFoundError:
        return __version__
    modules = sorted(f"{path} {path.hash.value}" for path in listed if path.suffix == ".py" and path.hash)
    digest = hashlib.sha256("\n".join(modules).encode()).hexdigest()[:8]
    return f"{__version__}+{digest}" if modules else __version__
