"""The Slurm job that an agent is a task of, and putting it back into the queue."""
