"""``python -m elastic_agent``, and where the installed ``elastic-agent`` command begins."""

from __future__ import annotations

import sys


def begin() -> None:
    """Run the command. Ctrl-C during its import gives no traceback either."""
    try:
        from elastic_agent.cli.main import console_main
        from elastic_agent.exit_codes import ExitCode
    except KeyboardInterrupt:
        sys.exit(130)
    try:
        console_main()
    except KeyboardInterrupt:
        sys.exit(ExitCode.INTERRUPTED)


if __name__ == "__main__":
    begin()
