"""Layouts to look at: arrays drawn over their devices, and one page for everything."""
