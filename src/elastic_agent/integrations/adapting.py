"""Adapts a framework once, by the features that are not disabled, and prints what is not as expected."""

from __future__ import annotations

import os
from collections.abc import Callable

from elastic_agent.integrations.disabling import FeatureT, enabled
from elastic_agent.integrations.say import say_once

__all__ = ["adapt"]


def adapt(
    variable: str, features: type[FeatureT], apply: Callable[[frozenset[FeatureT]], list[str] | None]
) -> frozenset[FeatureT]:
    """Adapt a framework, and return the features that are in force.

    Args:
        variable: the variable with the features that users disable.
        features: all features of the integration.
        apply: adapts what these features need; returns sentences about what is not as expected, or None if everything
            had been adapted before.
    """
    wanted, unknown = enabled(os.environ, variable, features)
    problems = apply(wanted)
    if problems is not None:
        say_once([*unknown, *problems])
    return wanted
