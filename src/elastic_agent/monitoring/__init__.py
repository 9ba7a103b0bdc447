"""What the run does: its status, history, goodput and speed. Pure."""
