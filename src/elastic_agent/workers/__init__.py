"""Worker processes: how they are started, logged, stopped, reaped and fenced.

The guard (`guard`, with `elastic_agent.linux`) runs as a process of its own and uses the standard library
only, so this package must stay empty: whatever it imported, every guard would pay for.
"""
