"""Agreement over a store: a node's session and the coordinator's thread."""
