"""Where a benchmark ran: what matters for its figures, nothing that names the machine."""

from __future__ import annotations

import importlib.metadata
import os

PACKAGES = ("optckpt", "ortools", "numpy", "keras", "tensorflow")


def facts() -> dict[str, str | int]:
    """Cores, bytes of memory where they are known, and the versions of packages."""
    cores = (
        len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    )
    found: dict[str, str | int] = {"cores": cores}
    if hasattr(os, "sysconf"):
        found["memory"] = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            continue
    return found


def described(where: dict[str, str | int]) -> str:
    """The facts in one line."""
    memory = where.get("memory")
    size = f", {memory / 2**30:.0f} GiB" if isinstance(memory, int) else ""
    versions = ", ".join(f"{name} {where[name]}" for name in PACKAGES if name in where)
    return f"{where['cores']} cores{size}; {versions}"
