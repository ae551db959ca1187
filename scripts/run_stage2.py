#!/usr/bin/env python3
"""Stage 2 as a script; see `--help`."""

from equiport.cli.stage2 import main

if __name__ == "__main__":
    main()
