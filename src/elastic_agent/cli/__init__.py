"""The ``elastic-agent`` command: one module per command, parsing and presentation only.

Nothing here imports torch or structlog before the settings are known to be good, so that ``--help`` and a
mistake are answered at once.
"""
