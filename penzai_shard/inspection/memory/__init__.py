"""What a compiled step needs of a device's memory, and what would save most."""
