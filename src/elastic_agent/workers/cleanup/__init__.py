"""What a generation leaves behind, and its removal: processes' shared memory, GPU memory."""
