"""The status of a run, its history, goodput and speed. Pure."""
