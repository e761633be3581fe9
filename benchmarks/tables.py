"""Figures as the documents show them."""

from measure import Interval


def shown(interval: Interval, form: str = "{:.2f}") -> str:
    return f"{form.format(interval.median)} ({form.format(interval.low)} to {form.format(interval.high)})"


def error_of(figures: dict, subject: str) -> str:
    """Return a subject's row error, median and 99th percentile, or nothing."""
    error = figures["errors"].get(subject)
    return f"{error['median']:.4f} / {error['p99']:.4f}" if error else ""


def met(reached: bool) -> str:
    return "yes" if reached else "no"


def ahead(figure: Interval) -> str:
    """Whether a speed over another tool's is above 1: "even" where the interval holds both."""
    return "yes" if figure.low > 1 else "even" if figure.high >= 1 else "no"


def table(head: tuple[str, ...], rows: list[tuple[str, ...]]) -> str:
    lines = [head, tuple("---" for _ in head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
