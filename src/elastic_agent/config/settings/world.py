"""Nodes and workers of the world: one group of settings."""

# ruff: noqa: RUF009 - setting returns a dataclass field, which is what a default may be

from __future__ import annotations

from dataclasses import dataclass

from elastic_agent.config import value_types
from elastic_agent.config.settings.spec import setting
from elastic_agent.config.values import Host, NodeRange
from elastic_agent.worker_variables import PREFIX


@dataclass(frozen=True, kw_only=True)
class WorldSettings:
    """See :class:`elastic_agent.config.settings.Settings`."""

    hosts: tuple[Host, ...] = setting(
        value_types.HOSTS,
        None,
        "Start the agents of these machines over ssh, with their output here; the first one hosts the store.",
        value=(),
        shown_default="none: only the agent of this machine is started",
    )
    nnodes: NodeRange = setting(
        value_types.NODES, "1", "Number of nodes, or its minimum and maximum.", torchrun=True
    )
    nproc_per_node: str = setting(
        value_types.SLOTS,
        "gpu-or-1",
        "Workers on this node: a number, or gpu, xpu, cpu (one per device of that type), auto (one per "
        "accelerator, else one per CPU that the agent may use), gpu-or-1 (one per GPU, or 1 without GPUs). It "
        "may differ between nodes.",
        torchrun=True,
        why="torchrun starts 1 worker, which leaves every GPU but one idle",
    )
    node_id: str | None = setting(
        value_types.NAME,
        None,
        "Name of this node in the run; stable across restarts.",
        variable=PREFIX + "SET_NODE_ID",
        shown_default="derived from the machine and kept in the state directory",
    )
    node_rank: int | None = setting(
        value_types.whole_number(0),
        None,
        "Preferred position of this node in the order of nodes. Without it, nodes are ordered by name.",
        torchrun=True,
        why="torchrun uses 0 on every node by default",
    )
    role: str = setting(
        value_types.TEXT, "default", "Role name of the workers, as visible to the workers.", torchrun=True
    )
    local_addr: str | None = setting(
        value_types.HOST,
        None,
        "Address at which the other nodes reach this one.",
        torchrun=True,
        shown_default="the address this machine uses to reach the endpoint",
    )
