"""What happened in a generation: the observations of all nodes, and what follows from them. Pure."""
