"""Keeps Holdfast's threads off the user's cores: torch uses one core in each of them."""

from __future__ import annotations

import ctypes
from pathlib import Path

import torch


def limit_this_thread() -> int:
    """Let torch use one core on the calling thread only; return the number it will use.

    OpenMP keeps its limit per thread. torch sets it on a thread's first use from a number that
    all threads share; asking for the number is a first use, so what is set after it stays.
    """
    torch.get_num_threads()
    for path in _openmp_libraries():
        ctypes.CDLL(path).omp_set_num_threads(1)
    return torch.get_num_threads()


def _openmp_libraries() -> set[str]:
    try:
        lines = Path("/proc/self/maps").read_text(encoding="utf-8").splitlines()
    except OSError:
        return set()
    paths = {line.split(maxsplit=5)[5] for line in lines if line.count("/")}
    return {p for p in paths if Path(p).name.startswith(("libgomp", "libiomp", "libomp"))}
