"""Whether an edited model computes what its original computes."""
