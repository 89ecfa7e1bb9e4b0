"""What a step needs and moves, found out before it runs."""
