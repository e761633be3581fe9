"""The embedded engine of `midstream serve`: sequences join and leave one batch on a transformers model."""
