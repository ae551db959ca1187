#!/usr/bin/env python3
"""The calibration as a script; see `--help`."""

from equiport.cli.calibration import main

if __name__ == "__main__":
    main()
