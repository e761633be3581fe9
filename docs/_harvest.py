"""Parts of the page on harvests that come from the code."""

from midstream.harvest.samples import COLUMNS, SCHEMA


def columns() -> str:
    """The columns of samples.parquet."""
    lines = ["| column | type | what |", "|---|---|---|"]
    lines += [f"| `{name}` | {SCHEMA.field(name).type} | {words} |" for name, (_, words) in COLUMNS.items()]
    return "\n".join(lines)
