"""All directed scenarios, by name."""

from __future__ import annotations

from . import scenarios_etcd, scenarios_lease, scenarios_work

SCENARIOS = {
    scenario.name: scenario
    for scenario in (*scenarios_lease.SCENARIOS, *scenarios_work.SCENARIOS, *scenarios_etcd.SCENARIOS)
}
