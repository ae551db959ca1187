#!/usr/bin/env python3
"""Stage 1 as a script; see `--help`."""

from equiport.cli.stage1 import main

if __name__ == "__main__":
    main()
