"""What a generation leaves behind in shared memory, and its removal."""
