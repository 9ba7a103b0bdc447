"""The plug-in for stock torchrun: torch's handler, and the sidecar process that takes part in the run for it."""
