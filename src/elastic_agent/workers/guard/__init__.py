"""The guard process: `__main__` and what it imports (standard library only); the agent's handle on it is `client`."""
