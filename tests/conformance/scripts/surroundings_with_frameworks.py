"""All cases of ``surroundings.py``, in a script that imports frameworks."""

import sys

import surroundings

if len(sys.argv) > 1:  # never; what a script imports is read from its source
    import datasets  # noqa: F401
    import lightning  # noqa: F401
    import transformers.pytorch_utils  # noqa: F401

surroundings.main([*surroundings.CASES, *surroundings.WITH_FRAMEWORKS])
