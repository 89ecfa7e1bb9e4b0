"""Prints reports on checkpoints."""

import dataclasses

from penzai_shard.reports.report import Report


def print_report(report: Report, as_json: bool, show_all: bool) -> None:
    """Prints a report as a table, or as JSON.

    Args:
        report: The report.
        as_json: Whether to print JSON.
        show_all: Whether tables have one row for each array, also of equal blocks.
    """
    if as_json:
        print(report.to_json())
    else:
        print(dataclasses.replace(report, collapse=not show_all))
