"""Prices of layouts by Shardy's propagation: what the compiler will send, without compiling."""

from penzai_shard.choosing.by_propagation.propagated_prices import PropagatedPrices

__all__ = ["PropagatedPrices"]
