"""What a server remembers: tables, the migrations that make them, and the database that holds them."""

from .database import Database, StorageError, default_data_dir, sqlite_url, storable

__all__ = ["Database", "StorageError", "default_data_dir", "sqlite_url", "storable"]
