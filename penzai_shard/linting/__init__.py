"""What in a model, its rules and its batches is probably a mistake or a waste."""
