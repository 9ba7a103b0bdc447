"""``python -m evaluation [NAME…] [--runs N] [--seed N] [--json FILE]``: make failures, rate what is said of them."""

from __future__ import annotations

import sys

from benchmarks.__main__ import Suite, main

EVALUATIONS = {
    "first_screen": "failures that people meet, and what the terminals say about each of them",
    "causes": "is the root cause right when several workers fail within 50 ms, the first one drawn at random",
}

if __name__ == "__main__":
    sys.exit(main(Suite("evaluation", EVALUATIONS)))
