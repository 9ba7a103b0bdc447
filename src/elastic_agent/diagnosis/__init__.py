"""The observations of all nodes in a generation, and what follows from them. Pure."""
