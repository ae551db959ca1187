#!/usr/bin/env python3
"""Stage 0 as a script; see `--help`."""

from equiport.cli.stage0 import main

if __name__ == "__main__":
    main()
