"""Users of this machine as a command line names them."""

from __future__ import annotations

import pwd

from elastic_agent.config.errors import UsageError, quoted


def name_of(uid: int) -> str:
    """The user's name, or the number where it has none."""
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def uid_of(command: str, user: str) -> int:
    """The number of a user given by name or number.

    Raises:
        UsageError: there is no such user.
    """
    try:
        return int(user) if user.isdecimal() else pwd.getpwnam(user).pw_uid
    except (KeyError, ValueError):
        raise UsageError(f"{command}: --user: got {quoted(user)}; expected a user of this machine") from None
