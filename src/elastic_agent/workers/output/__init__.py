"""The workers' output: its files, their limits, and their content after a worker's end."""
