"""Brings preloaded modules up to date in a worker where they keep something that differs between workers.

They read it from the environment when they are imported, which in a warm worker was in the spawner.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import Any


def _lightning(module: Any) -> None:
    module.rank_zero_only.rank = module._get_rank() or 0


def _torchmetrics(module: Any) -> None:
    module.rank_zero_only.rank = int(os.environ.get("LOCAL_RANK", "0"))


RENEWED: dict[str, Callable[[Any], None]] = {
    "lightning.fabric.utilities.rank_zero": _lightning,
    "lightning_fabric.utilities.rank_zero": _lightning,
    "torchmetrics.utilities.prints": _torchmetrics,
}
"""Each does what the module does itself in the process that imports it."""


def renew_modules() -> None:
    """Call with the worker's environment in place."""
    for name, renew in RENEWED.items():
        module = sys.modules.get(name)
        if module is not None:
            renew(module)
