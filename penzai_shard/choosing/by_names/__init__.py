"""Stage one: every candidate priced by the names of logical axes, from one trace."""

from penzai_shard.choosing.by_names.name_prices import NamePrices

__all__ = ["NamePrices"]
