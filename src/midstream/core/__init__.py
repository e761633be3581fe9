"""Plain data and pure functions; no engine, no model code."""
