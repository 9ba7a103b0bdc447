"""The agent's control socket, and the commands that come in over it."""
