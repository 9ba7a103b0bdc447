"""What a script can see and do is the same under the agent as under ``python -u``."""
