"""Disables parts of an integration by name."""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from typing import TypeVar

FeatureT = TypeVar("FeatureT", bound=StrEnum)


def enabled(
    environ: Mapping[str, str], variable: str, features: type[FeatureT]
) -> tuple[frozenset[FeatureT], list[str]]:
    """The features that are not disabled, and a sentence if there are names that are not features.

    Args:
        environ: the environment.
        variable: the variable with a comma-separated list of features to disable.
        features: all features of the integration; their values are the names.
    """
    text = environ.get(variable, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    known = {str(feature): feature for feature in features}
    unknown = [name for name in names if name not in known]
    wanted = frozenset(features) - {known[name] for name in names if name in known}
    if not unknown:
        return wanted, []
    listed = f"{', '.join(unknown)}; expected a comma-separated list of {', '.join(known)}"
    return wanted, [f"{variable}={text!r}: no such feature: {listed}"]
