"""How a report unfolds: a tree of lines with figures, and its views."""
