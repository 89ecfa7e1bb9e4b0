"""Where the layout of each value of a program comes from, by the compiler's own propagation."""
