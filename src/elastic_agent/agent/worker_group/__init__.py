"""The workers of one generation on this node: how they are described, started and watched."""
