"""Fault injection: real agents, real gloo workers, real kills."""
