"""The only door to JAX beyond its stable interface: each name with its reason and version."""
