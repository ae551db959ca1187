"""Prints, for every contract case, the largest relative L2 difference between stand-in and real stack.

EQUIPORT_NXDI_SRC=<source> EQUIPORT_NXD_SRC=<source> python tests/adapters/nxdi/contract/table.py
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path[:0] = [str(Path(__file__).resolve().parent)]

from registry import cases, load_cases  # noqa: E402
from tiers import figures, why_no_real_tier  # noqa: E402


def main() -> int:
    """0 when every case agrees to 1e-5."""
    absent = why_no_real_tier()
    if absent:
        print(absent)
        return 4
    load_cases()
    worst_of_all = 0.0
    print(f"{'case':52} {'values':>6} {'worst rel. L2':>13}")
    for item in cases():
        found = figures(item.name)
        worst = max(found, key=lambda figure: figure.difference)
        worst_of_all = max(worst_of_all, worst.difference)
        print(
            f"{item.name:52} {len(found):6d} {worst.difference:13.1e}  {worst.note and worst.value}{worst.note[:400]}"
        )
    print(f"{len(cases())} cases, worst {worst_of_all:.1e}")
    return 0 if worst_of_all <= 1e-5 else 1


if __name__ == "__main__":
    raise SystemExit(main())
