"""The etcd backend: the agents of a run elect their coordinator."""
