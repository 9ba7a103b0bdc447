"""The c10d backend: an agent, or `elastic-agent serve`, hosts the store and coordinates all runs in it."""
