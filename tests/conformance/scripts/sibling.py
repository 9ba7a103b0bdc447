"""A module beside a script."""

import sys

WHO_IMPORTS = sys.modules["__main__"].__name__


def value():
    return 42
