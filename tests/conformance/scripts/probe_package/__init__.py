"""Holds the probe, so that it can be run by its path and by its name."""
