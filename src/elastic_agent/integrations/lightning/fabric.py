"""Notices for Fabric scripts: they leave after a checkpoint of their own.

What a script saves is known to the script only, and so is when. All ranks call ``Fabric.save`` together, so it is a
point where they can agree on a notice without another one.
"""

from __future__ import annotations

import time
from typing import Any

from elastic_agent import client
from elastic_agent.integrations.lightning.notices import from_rank_0
from elastic_agent.integrations.say import say

SOON_S = 20.0
"""A script that saves this often leaves after its next checkpoint. One that saves more rarely could only be waited for
in vain: a node that is drained gives its workers 30 s."""

_STATE = "_elastic_agent_saves"


class Saves:
    """When a Fabric saved, and the notice that its ranks know of."""

    def __init__(self) -> None:
        self._agreement = client.Agreement()
        self._last_s: float | None = None
        self._often = False

    def notice_after_save(self) -> client.Notice | None:
        """The notice on which all ranks leave now, or None. A collective."""
        now_s = time.monotonic()
        if self._last_s is not None and not self._often:
            self._often = bool(from_rank_0(now_s - self._last_s < SOON_S))
        self._last_s = now_s
        if not self._often:
            return None
        self._agreement.notice()  # starts to agree
        return self._agreement.notice()


def leave_after_save(fabric: Any) -> None:
    """A checkpoint is complete: leave if there is a notice."""
    saves = vars(fabric).setdefault(_STATE, Saves())
    notice = saves.notice_after_save()
    if notice is not None:
        if fabric.is_global_zero:
            say(f"notice ({notice.reason}): leaving after the checkpoint that the script has saved")
        client.leave()
