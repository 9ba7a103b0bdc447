"""The status page of an agent, its JSON interface and its metrics: read-only, over HTTP."""
