"""Agreement over a store: a node's session, the coordinator's thread, torch's ``RendezvousHandler``."""
