"""Tests of ``elastic-agent doctor``."""
