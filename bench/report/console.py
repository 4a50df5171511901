"""Where tables for people go."""

import sys

from rich.console import Console

FILE_COLUMNS = 160  # of text where the output is no terminal


def output_console() -> Console:
    """The standard output: as wide as its terminal, or wide enough for tables where it is none."""
    return Console(highlight=False, width=None if sys.stdout.isatty() else FILE_COLUMNS)
