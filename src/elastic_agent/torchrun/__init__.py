"""The plug-in for stock torchrun: torch's handler, and the node that takes part in the run in a thread beside it."""
