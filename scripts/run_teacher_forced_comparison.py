#!/usr/bin/env python3
"""Stages 5 and 6 in one pass; see `--help`."""

from equiport.cli.teacher_forced import main

if __name__ == "__main__":
    main()
