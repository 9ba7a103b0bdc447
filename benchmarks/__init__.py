"""Measurements of elastic-agent beside torchrun: ``python -m benchmarks --help``."""
