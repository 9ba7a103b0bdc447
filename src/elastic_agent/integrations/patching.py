"""Replaces functions of frameworks: all that a feature needs, or nothing.

The version that the tests run with is known to fit. In any other, the source of what is replaced, and of what a
replacement depends on, is searched for what it has to contain. A feature that does not fit is left out.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import os
import sys
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from enum import StrEnum
from typing import Any, TypeVar

from elastic_agent.worker_variables import TRAINER_MEMORY

F = TypeVar("F", bound=Callable[..., Any])
S = TypeVar("S", bound=StrEnum)


@dataclass(frozen=True)
class Patch:
    """A function that a feature replaces or, without ``replace``, depends on."""

    feature: StrEnum | None
    """None: all features need it."""
    place: str
    """Below the framework's package: its module and its path in there, such as ``trainer.trainer:Trainer.fit``."""
    needed: tuple[str, ...]
    """Texts that the function's source has to contain."""
    replace: Callable[..., Any] | None = None
    """Is called in its place, with the function itself before the arguments."""

    def find(self, root: str) -> tuple[Any, str, Any]:
        """Return the owner of the attribute, its name and its present value; LookupError: there is none."""
        module, _, path = self.place.partition(":")
        *owners, name = path.split(".")
        try:
            owner: Any = importlib.import_module(f"{root}.{module}")
            for part in owners:
                owner = getattr(owner, part)
            return owner, name, vars(owner)[name]
        except (ImportError, AttributeError, KeyError) as error:
            raise LookupError(f"{path} no longer exists") from error

    def misfit(self, root: str, *, read_source: bool) -> str:
        """Return why the framework's function is not the one that is expected; empty if it is."""
        try:
            owner, name, found = self.find(root)
        except LookupError as error:
            return str(error)
        if not read_source or not self.needed:
            return ""
        path = self.place.partition(":")[2]
        try:
            function: Any = found.fget if isinstance(found, property) else getattr(owner, name)
            source = inspect.getsource(inspect.unwrap(function))
        except (OSError, TypeError):
            return f"the source of {path} is not there"
        return next((f"{path} lacks {text!r}" for text in self.needed if text not in source), "")

    def apply(self, root: str) -> None:
        """Replace the function, if it is one to be replaced."""
        if self.replace is None:
            return
        owner, name, found = self.find(root)
        if isinstance(found, property):
            setattr(owner, name, property(_calling(self.replace, found.fget)))
        elif isinstance(found, staticmethod):
            setattr(owner, name, staticmethod(_calling(self.replace, found.__func__)))
        else:
            setattr(owner, name, _calling(self.replace, found))


def _calling(replace: Callable[..., Any], original: Any) -> Callable[..., Any]:
    @functools.wraps(original)
    def replacement(*args: Any, **kwargs: Any) -> Any:
        return replace(original, *args, **kwargs)

    return replacement


class Patches:
    """All functions of a framework's package that its integration replaces or depends on."""

    def __init__(self) -> None:
        self.all: list[Patch] = []
        """In the order in which they are applied."""

    def replace(self, feature: StrEnum | None, place: str, *needed: str) -> Callable[[F], F]:
        """Have the decorated function called in place of the framework's; arguments as for :class:`Patch`."""

        def add(replacement: F) -> F:
            self.all.append(Patch(feature, place, needed, replacement))
            return replacement

        return add

    def need(self, feature: StrEnum | None, place: str, *needed: str) -> None:
        """Have a feature depend on a function that is not replaced; arguments as for :class:`Patch`."""
        self.all.append(Patch(feature, place, needed))

    def misfits(
        self, root: str, features: frozenset[StrEnum], *, read_source: bool
    ) -> dict[StrEnum | None, str]:
        """Return, for each of these features that the package does not fit, why; None stands for all."""
        found: dict[StrEnum | None, str] = {}
        for patch in self.all:
            if patch.feature not in found and patch.feature in {None, *features}:
                problem = patch.misfit(root, read_source=read_source)
                if problem:
                    found[patch.feature] = problem
        return found

    def apply(self, root: str, versions: tuple[str, str], features: frozenset[S]) -> frozenset[S]:
        """Apply the patches of these features, and return the features that fit.

        Args:
            root: the framework's package.
            versions: the one that is installed, and the one that the tests run with.
            features: those to apply.
        """
        installed, tested = versions
        problems = self.misfits(root, features, read_source=installed != tested)
        for patch in self.all:
            if patch.feature in {None, *features} and not {None, patch.feature} & problems.keys():
                patch.apply(root)
        if not problems:
            return features
        if None in problems:
            problems = {None: problems[None]}
        why = "; ".join(f"{feature or 'all'}: {problem}" for feature, problem in problems.items())
        say_once([f"{root} {installed} differs from {tested}, so that these features are left out: {why}"])
        return frozenset(feature for feature in features if not {None, feature} & problems.keys())


def wanted(variable: str, features: type[S], *, quietly: bool = False) -> frozenset[S]:
    """Return the features that the user has not disabled, by a list of names in an environment variable.

    A feature ``memory`` needs the memory that the agent gives with --survive memory or keep.
    """
    text = os.environ.get(variable, "")
    names = [name.strip() for name in text.split(",") if name.strip()]
    unknown = [name for name in names if name not in {*features}]
    if unknown and not quietly:
        listed = f"{', '.join(unknown)}; expected a comma-separated list of {', '.join(features)}"
        say_once([f"{variable}={text!r}: no such feature: {listed}"])
    if TRAINER_MEMORY not in os.environ:
        names.append("memory")
    return frozenset(feature for feature in features if feature not in names)


def say(line: str) -> None:
    """Print one line on stderr, at once, beside those of the framework and of other processes."""
    print(f"elastic_agent: {line}\n", end="", file=sys.stderr, flush=True)


def say_once(lines: Iterable[str]) -> None:
    """Print lines that all workers have alike: on rank 0 only."""
    if os.environ.get("RANK") == "0":
        for line in lines:
            say(line)
