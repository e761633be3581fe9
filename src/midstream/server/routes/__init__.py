"""Routes, one file for each group of HTTP.md's table."""
