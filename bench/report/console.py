"""Figures and progress as text for people."""

import sys
from collections.abc import Mapping, Sequence

from tandem.bench.report.figures import Figure, table


def print_figures(figures: Sequence[Figure], how: Mapping[str, str]) -> None:
    """Print the table, the verdicts in sum, notes, failures and definitions."""
    print(table(figures))
    judged = [figure for figure in figures if figure.target is not None]
    if judged:
        num_met = sum(figure.verdict in ("met", "stretch") for figure in judged)
        print(f"\n{num_met} of {len(judged)} targets met")
    for figure in figures:
        if figure.notes:
            print(f"\n{figure.label}:", *figure.notes, sep="\n  ")
    print(
        "\nwhat the figures mean:", *(f"  {name}: {text}" for name, text in how.items()), sep="\n"
    )
    for figure in figures:
        if figure.failure:
            print(f"{figure.name} gave no figure: {figure.failure}")


def say(text: str) -> None:
    """Print a line of progress."""
    print(text, file=sys.stderr, flush=True)
