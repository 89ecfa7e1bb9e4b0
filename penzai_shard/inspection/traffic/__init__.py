"""What a compiled step moves between devices, and whose it is."""
