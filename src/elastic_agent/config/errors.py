"""The error for invalid settings, and suggestions for misspelled names."""

from __future__ import annotations

import re
from collections.abc import Iterable

_SHOWN_CHARACTERS = 80
_LONGEST_WORD = 100
_SHORTEST_BEGINNING = 3
_IN_URL = re.compile(r"(?:^|//)[^/:@\s]*:(?!//)")
_IN_LATER_URL = re.compile(r"//[^/:@\s]*:(?!//)")
_PASSWORD = re.compile(r"(password\s*=\s*)[^,]+", re.IGNORECASE)


class UsageError(Exception):
    """Something the user gave is wrong. ``str()`` is one line: what, from where, and what is accepted.

    The command line prints it and exits with code 2; other callers of ``load_settings`` may catch it.

    Attributes:
        problem: what is wrong, and from where.
        remedy: what is accepted, or what to do; empty: the problem says it.
    """

    def __init__(self, problem: str, remedy: str = "") -> None:
        super().__init__(f"{problem}; {remedy}" if remedy else problem)
        self.problem = problem
        self.remedy = remedy


class MissingScriptError(UsageError):
    """Neither the command line nor a settings file names a script."""


class HelpRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--help`` or ``-h``; the argument is the command's own page, or empty."""

    options: tuple[str, ...] = ()
    """Those that the command's parser accepts, if it has its own."""


class ShortHelpRequested(HelpRequested):
    """The command line has ``-h``."""


class VersionRequested(Exception):  # noqa: N818 - not an error
    """The command line has ``--version``."""


class BadValueError(Exception):
    """A value that its kind does not accept.

    Attributes:
        wrong: what is wrong with it, as a clause that follows the value ("which is …"); may be empty.
        hint: what was perhaps meant; may be empty.
    """

    def __init__(self, wrong: str = "", hint: str = "") -> None:
        super().__init__(wrong or hint)
        self.wrong = wrong
        self.hint = hint


def masked(text: str) -> str:
    """Mask the passwords of URLs (also of those that lack a scheme) and of ``password=``, for a message.

    >>> masked("http://trainer:hunter2@etcd1:2379"), masked("user=trainer,password=hunter2,timeout=5")
    ('http://trainer:***@etcd1:2379', 'user=trainer,password=***,timeout=5')
    """
    # Not one expression for URLs: trying every start with every end takes minutes for some long texts.
    first, *rest = text.split("\n")
    lines = (
        _without_url_password(first, _IN_URL),
        *(_without_url_password(line, _IN_LATER_URL) for line in rest),
    )
    return _PASSWORD.sub(lambda found: f"{found[1]}***", "\n".join(lines))


def _without_url_password(line: str, begins: re.Pattern[str]) -> str:
    """Mask the password of a URL; it ends at the last ``@`` of the line."""
    end = line.rfind("@")
    found = begins.search(line, 0, max(0, end))
    return f"{line[: found.end()]}***{line[end:]}" if found is not None and found.end() < end else line


def quoted(value: object) -> str:
    """Quote ``value`` for a one-line message: control characters escaped, cut in the middle when long.

    Both ends stay, because a path is known by its last part.
    """
    text = masked(str(value))
    if len(text) > _SHOWN_CHARACTERS:
        half = (_SHOWN_CHARACTERS - 3) // 2
        text = f"{text[:half]}...{text[-half:]}"
    escaped = "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in text)
    return f'"{escaped}"'


def nearest(word: str, known: Iterable[str], *, likeness: float = 0.6) -> str | None:
    """Return the known word most like ``word``, or None when none is alike. ``likeness`` runs from 0 to 1."""
    import difflib  # only needed once something is wrong

    if len(word) > _LONGEST_WORD:  # nothing known is like it, and comparing takes long
        return None
    found = difflib.get_close_matches(word, list(known), n=1, cutoff=likeness)
    return found[0] if found else None


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return ``did you mean X?`` for the shortest known word that begins so, else for the nearest; or an empty text."""
    known = list(known)
    begin_so = [name for name in known if len(word) >= _SHORTEST_BEGINNING and name.startswith(word)]
    found = min(begin_so, key=len) if begin_so else nearest(word, known)
    return f"did you mean {found}?" if found else ""
