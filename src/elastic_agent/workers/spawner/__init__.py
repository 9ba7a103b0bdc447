"""The spawner process, which forks warm workers. Every warm worker has what is imported here, so this stays empty."""
