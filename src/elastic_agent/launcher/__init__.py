"""Start the agent of this node from a program or a notebook, with a function for workers.

    import elastic_agent

    losses = elastic_agent.launch(train, 1e-3, nproc_per_node=2, rdzv_endpoint="host0:29400", nnodes="1:4")
    print(losses[0])                             # what rank 0 returned

The agent runs in a process of its own.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from elastic_agent.launcher.agent_process import LaunchError, run_agent

__all__ = ["LaunchError", "launch"]


def launch(entrypoint: Callable[..., Any] | str, *args: Any, **settings: Any) -> dict[int, Any]:
    """Run ``entrypoint(*args)`` in the workers of an elastic run, with the agent of this node.

    Args:
        entrypoint: a function, which is pickled (with cloudpickle if that is installed); or a program, for which
            ``args`` are its arguments.
        args: what every worker passes to it.
        settings: settings of the agent, by their names in the settings file; others come from the environment and
            from the file as usual.

    Returns:
        What the function returned, by global rank, for the workers of this node; None for each worker of a program.

    Raises:
        torch.distributed.elastic.multiprocessing.errors.ChildFailedError: workers of this node failed, and the
            restart budget is exhausted.
        LaunchError: the run ended otherwise without success, or could not be started.
        TypeError: there is no such setting, or the function or an argument cannot be pickled.
    """
    return run_agent(entrypoint, args, settings)
