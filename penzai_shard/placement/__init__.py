"""Carries plans out: puts arrays on a mesh, compiles with layouts, builds models in place."""
