"""Elastic launcher for PyTorch: one agent per machine, the same command everywhere.

Importing this package loads nothing heavy. Training scripts use :mod:`elastic_agent.client`; programs and notebooks
that start workers use :func:`launch`.
"""

TYPE_CHECKING = False
if TYPE_CHECKING:
    from typing import Any

    from elastic_agent.launcher import launch as launch

__version__ = "0.1.0"


def installed_version() -> str:
    """Return the version, with a digest of the installed modules; without it where the sources themselves are used.

    Until there are releases, all installations have the same version, and the digest tells them apart.
    """
    import hashlib
    from importlib.metadata import PackageNotFoundError, files

    try:
        listed = files("elastic-agent") or []
    except PackageNotFoundError:
        return __version__
    modules = sorted(f"{path} {path.hash.value}" for path in listed if path.suffix == ".py" and path.hash)
    digest = hashlib.sha256("\n".join(modules).encode()).hexdigest()[:8]
    return f"{__version__}+{digest}" if modules else __version__


def __getattr__(name: str) -> "Any":
    """Return ``launch``, imported when it is used: workers and the guard import this package too."""
    if name == "launch":
        from elastic_agent.launcher import launch

        return launch
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
