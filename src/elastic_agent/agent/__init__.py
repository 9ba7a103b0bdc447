"""The elastic agent: one loop that waits for an event and acts."""
