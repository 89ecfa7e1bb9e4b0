"""Trains models of any library: a state of plain arrays by path, and steps that compile once."""
