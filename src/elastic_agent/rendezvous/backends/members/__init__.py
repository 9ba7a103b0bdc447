"""The members backend: the agents on three or five named machines supervise an etcd, in which all agents meet."""
