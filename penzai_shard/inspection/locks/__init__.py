"""What a step is allowed to hold and send, as a file that is committed."""
