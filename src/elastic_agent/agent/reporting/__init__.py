"""The reports of an agent: on the console, in the event log, to systemd."""
