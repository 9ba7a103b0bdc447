"""The files that a generation leaves behind in shared memory, and its removal."""
