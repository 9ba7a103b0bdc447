"""The workers' output: its files, their limits, and what they say at the end."""
