"""What runs as PID 1 of a container. Sent there as text, it imports the standard library and itself."""
