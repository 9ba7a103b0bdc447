"""Fault injection for training scripts: a cluster of several nodes on one machine, faults, and checks.

    from elastic_agent.testing import Options, run_chaos

    report = run_chaos(["train.py", "--epochs", "3"], Options(nodes=3, faults=("worker-killed", "node-killed")))
    assert report.passed, report.text()

The command ``elastic-agent chaos`` does the same.
:class:`LocalCluster` starts real agents with real workers; faults are injected with its methods. See docs/chaos.md.
"""

from __future__ import annotations

from elastic_agent.testing.chaos import FaultResult, Options, Report, run_chaos
from elastic_agent.testing.cluster import ClusterError, LocalCluster
from elastic_agent.testing.faults import FAULTS
from elastic_agent.testing.mistakes import Check, Mistake
from elastic_agent.testing.processes import NodeProcess

__all__ = [
    "FAULTS",
    "Check",
    "ClusterError",
    "FaultResult",
    "LocalCluster",
    "Mistake",
    "NodeProcess",
    "Options",
    "Report",
    "run_chaos",
]
