"""elastic-agent's own rendezvous behind torch's interface.

The agent is driven by events and never polls, so most of the interface has nothing to do; the handler that does
work for stock torchrun is in :mod:`elastic_agent.torchrun.handler`.
"""

from __future__ import annotations

from torch.distributed.elastic.rendezvous.api import RendezvousHandler, RendezvousInfo, RendezvousStateError


class AgentRendezvous(RendezvousHandler):
    """elastic-agent's rendezvous behind torch's interface; the agent itself drives the session."""

    def __init__(self, run_id: str, backend: str) -> None:
        self._run_id = run_id
        self._backend = backend

    def get_backend(self) -> str:
        """The store that holds the agreement."""
        return self._backend

    @property
    def use_agent_store(self) -> bool:
        """Workers use a bootstrap store that an agent hosts."""
        return True

    def next_rendezvous(self) -> RendezvousInfo:
        """Not to be called: elastic-agent's worlds are formed by its own event loop."""
        raise RendezvousStateError(
            "the elastic-agent backend forms each world itself; it does not accept requests for one"
        )

    def is_closed(self) -> bool:
        """Never closed from outside."""
        return False

    def set_closed(self) -> None:
        """Nothing to do: the run ends by its outcome."""

    def num_nodes_waiting(self) -> int:
        """Always 0: the agent is notified of waiting nodes and does not poll."""
        return 0

    def get_run_id(self) -> str:
        """The run's id."""
        return self._run_id

    def shutdown(self) -> bool:
        """Nothing to do: the agent closes its session itself."""
        return True
