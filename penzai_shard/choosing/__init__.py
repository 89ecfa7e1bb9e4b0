"""Names for models that have none, and the layout found among all sane ones."""
