"""Costs: seconds and workspace bytes of each operation of a captured graph."""

from optckpt.costs.cache import Cost, CostCache, cache_folder, default_cache
from optckpt.costs.registry import (
    CostModel,
    CostOptions,
    ProgressCallback,
    cost,
    get,
    names,
    register,
)

__all__ = [
    "Cost",
    "CostCache",
    "CostModel",
    "CostOptions",
    "ProgressCallback",
    "cache_folder",
    "cost",
    "default_cache",
    "get",
    "names",
    "register",
]
