#!/usr/bin/env python3
"""Stage 7 as a script; see `--help`."""

from equiport.cli.stage7 import main

if __name__ == "__main__":
    main()
