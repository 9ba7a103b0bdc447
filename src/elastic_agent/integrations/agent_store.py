"""Has PyTorch use the agents' store at its own port only, so that scripts can host stores of their own at others.

With ``TORCHELASTIC_USE_AGENT_STORE``, torch 2.13 makes each rank a client of whatever address the script gives, for
example as ``init_method="tcp://..."``: nobody hosts that store, and all wait for it. Later versions compare the address
with ``MASTER_ADDR`` and ``MASTER_PORT``, which children of ``mp.spawn`` usually set to the store of their own.
"""

from __future__ import annotations

import os

from elastic_agent.integrations.collectives import private_names
from elastic_agent.worker_variables import STORE_PORT

__all__ = ["install"]


def install() -> None:
    """Begin once ``torch.distributed.rendezvous`` has been imported."""
    private_names.limit_agent_store(lambda port: str(port) == os.environ.get(STORE_PORT, str(port)))
