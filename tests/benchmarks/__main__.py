"""Runs all benchmarks and writes docs/benchmarks.md: `make bench`."""

import os
import platform
from pathlib import Path

from . import bench_overhead, bench_steps


def main() -> None:
    """Measure, print and write."""
    machine = f"{platform.machine()}, {os.cpu_count()} cores, Python {platform.python_version()}"
    head = f"# Benchmarks\n\nWritten by `make bench` on {machine}. Compare the ratios, not the times."
    text = "\n\n".join([head, bench_overhead.section(), bench_steps.section()])
    Path("docs/benchmarks.md").write_text(text)
    print(text)


if __name__ == "__main__":
    main()
