"""Replaces functions of frameworks: all that a feature needs, or nothing.

The version that the tests run with is known to fit. In any other, the source of what is replaced, and of what a
replacement depends on, is searched for what it has to contain. A feature that does not fit is left out.
"""

from __future__ import annotations

import importlib
import inspect
import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from elastic_agent.integrations.say import say_once


@dataclass(frozen=True)
class Patch:
    """A function that a feature replaces or, without ``replace``, depends on."""

    feature: StrEnum | None
    """None: all features need it."""
    module: str
    """Below the framework's package; empty: the package itself."""
    path: str
    """In the module, such as ``Trainer.fit``."""
    replace: Callable[[Any], Any] | None = None
    """Gets the present attribute, returns its replacement."""
    needed: tuple[str, ...] = ()
    """What the function's source has to contain."""
    roots: tuple[str, ...] = ()
    """The packages that have it; empty: all."""

    def find(self, root: str) -> tuple[Any, str, Any]:
        """Return the owner of the attribute, its name and its present value; LookupError: there is none."""
        *owners, name = self.path.split(".")
        try:
            owner: Any = importlib.import_module(self._module(root))
            for part in owners:
                owner = getattr(owner, part)
            return owner, name, vars(owner)[name]
        except (ImportError, AttributeError, KeyError) as error:
            raise LookupError(f"{self.path} no longer exists") from error

    def misfit(self, root: str, *, read_source: bool) -> str:
        """Return why the framework's function is not the one that is expected; empty if it is."""
        try:
            owner, name, found = self.find(root)
        except LookupError as error:
            return str(error)
        if not read_source or not self.needed:
            return ""
        try:
            function: Any = found.fget if isinstance(found, property) else getattr(owner, name)
            source = inspect.getsource(inspect.unwrap(function))
        except (OSError, TypeError):
            return f"the source of {self.path} is not there"
        return next((f"{self.path} lacks {text!r}" for text in self.needed if text not in source), "")

    def apply(self, root: str) -> None:
        """Replace the function, if it is one to be replaced."""
        if self.replace is not None:
            owner, name, found = self.find(root)
            setattr(owner, name, self.replace(found))

    def _module(self, root: str) -> str:
        return f"{root}.{self.module}" if self.module else root


def wanted(variable: str, features: type[StrEnum], *, quietly: bool = False) -> frozenset[StrEnum]:
    """Return the features that the user has not disabled, by a list of names in an environment variable."""
    text = os.environ.get(variable, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in {*features}]
    if unknown and not quietly:
        listed = f"{', '.join(unknown)}; expected a comma-separated list of {', '.join(features)}"
        say_once([f"{variable}={text!r}: no such feature: {listed}"])
    return frozenset(feature for feature in features if feature not in names)


def misfits(root: str, patches: Iterable[Patch], *, read_source: bool) -> dict[StrEnum | None, str]:
    """Return, for each feature that the package does not fit, why."""
    found: dict[StrEnum | None, str] = {}
    for patch in patches:
        if patch.feature not in found and (not patch.roots or root in patch.roots):
            problem = patch.misfit(root, read_source=read_source)
            if problem:
                found[patch.feature] = problem
    return found


def apply(
    root: str, versions: tuple[str, str], patches: Sequence[Patch], features: frozenset[StrEnum]
) -> frozenset[StrEnum]:
    """Apply the patches of these features, and return the features that do not fit.

    Args:
        root: the framework's package.
        versions: the one that is installed, and the one that the tests run with.
        patches: all patches.
        features: those to apply.
    """
    here = [one for one in patches if not one.roots or root in one.roots]
    here = [one for one in here if one.feature is None or one.feature in features]
    installed, tested = versions
    problems = misfits(root, here, read_source=installed != tested)
    for patch in here:
        if None not in problems and patch.feature not in problems:
            patch.apply(root)
    if not problems:
        return frozenset()
    if None in problems:
        problems = {None: problems[None]}
    why = "; ".join(f"{feature or 'all'}: {problem}" for feature, problem in problems.items())
    say_once([f"{root} {installed} differs from {tested}, so that these features are left out: {why}"])
    return features if None in problems else frozenset(one for one in problems if one is not None)
