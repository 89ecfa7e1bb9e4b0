"""What candidates cost by the compiled step: the third and most exact of the prices."""

from penzai_shard.choosing.by_compiling.compiled_prices import CompiledPrices

__all__ = ["CompiledPrices"]
