"""Tells installed modules, which stay as they are while a job runs, from the user's own."""

from __future__ import annotations

import os

_STANDARD_LIBRARY = os.path.dirname(os.__file__) + "/"
_PACKAGES = ("/site-packages/", "/dist-packages/")
_OWN_PACKAGE = __name__.partition(".")[0]


def is_installed_file(path: str) -> bool:
    """Whether the file belongs to an installed package or to the standard library."""
    return path.startswith(_STANDARD_LIBRARY) or _PACKAGES[0] in path or _PACKAGES[1] in path


def is_own(name: str) -> bool:
    """Whether the module is one of this package's: a worker gets its own copy, whatever the spawner has imported."""
    return name.partition(".")[0] == _OWN_PACKAGE


def is_installed(name: str, module: object) -> bool:
    """Whether `sys.modules` has an installed module under this name, which can be imported by it.

    Touches no attribute that a module computes: some import others then.
    """
    try:
        spec = vars(module)["__spec__"]
        if spec is None or spec.name != name or is_own(name):
            return False
        origin = spec.origin
        if origin in ("built-in", "frozen"):
            return True
        return isinstance(origin, str) and is_installed_file(origin)
    except (TypeError, KeyError, AttributeError):
        return False
