"""What an agent reports: on the console, in the event log, to systemd."""
