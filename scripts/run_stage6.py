#!/usr/bin/env python3
"""Stage 6 as a script; see `--help`."""

from equiport.cli.stage6 import main

if __name__ == "__main__":
    main()
