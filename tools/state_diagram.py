"""Write the node's state diagram into docs/internals.md, from the table in protocol/activity.py.

python tools/state_diagram.py            # writes it
python tools/state_diagram.py --check    # fails if the page differs from the table
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from elastic_agent.protocol import TRANSITIONS, Activity

PAGE = Path(__file__).parents[1] / "docs" / "internals.md"
BEGIN = "<!-- Made by: python tools/state_diagram.py (a test compares them) -->\n"
END = "<!-- end of the diagram -->\n"


def diagram() -> str:
    """One arrow for each change of the activity, with all events that cause it."""
    arrows: dict[tuple[Activity, Activity], list[str]] = {}
    for (before, event), after in TRANSITIONS.items():
        if after is not before:
            arrows.setdefault((before, after), []).append(event.value)
    lines = [f"    {before} --> {after}: {', '.join(events)}" for (before, after), events in arrows.items()]
    edges = "\n".join([f"    [*] --> {Activity.IDLE}", *lines, f"    {Activity.GONE} --> [*]"])
    return f"```mermaid\nstateDiagram-v2\n{edges}\n```\n"


def main() -> int:
    """Exit code 1: the page is out of date (with ``--check``)."""
    page = PAGE.read_text(encoding="utf-8")
    fresh = re.sub(
        f"{re.escape(BEGIN)}.*?{re.escape(END)}", lambda _: f"{BEGIN}\n{diagram()}\n{END}", page, flags=re.S
    )
    if "--check" not in sys.argv[1:]:
        PAGE.write_text(fresh, encoding="utf-8")
    elif fresh != page:
        print(f"{PAGE.name}: the state diagram differs from protocol/activity.py; run tools/state_diagram.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
