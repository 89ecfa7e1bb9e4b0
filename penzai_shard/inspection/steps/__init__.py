"""A step lowered and compiled, its layers marked; nothing runs."""
