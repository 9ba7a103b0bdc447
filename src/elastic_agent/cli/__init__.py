"""The ``elastic-agent`` command: one module per command, parsing and presentation only.

Nothing here imports torch or structlog before the settings are valid, so that ``--help`` and usage errors are
answered at once.
"""
