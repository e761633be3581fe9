"""How a database of an older version becomes one of this: alembic's steps, which run as it is opened."""

from typing import Final

VERSION_TABLE: Final = "midstream_version"
"""Where a database keeps which steps it has had."""
