"""Elastic launcher for PyTorch: one agent per machine, the same command everywhere.

Importing this package loads nothing heavy. Training scripts use :mod:`elastic_agent.client`.
"""

__version__ = "0.1.0"
