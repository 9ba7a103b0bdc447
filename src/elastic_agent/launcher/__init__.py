"""Start the agent of this node from a program or a notebook, with a function for workers.

    import elastic_agent

    losses = elastic_agent.launch(train, 1e-3, nproc_per_node=2, rdzv_endpoint="host0:29400", nnodes="1:4")
    print(losses[0])                             # what rank 0 returned

The agent runs in a process of its own.
"""

from __future__ import annotations

from elastic_agent.launcher.agent_process import LaunchError, launch

__all__ = ["LaunchError", "launch"]
