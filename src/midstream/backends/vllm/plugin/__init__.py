"""Runs inside vLLM's processes; does nothing in an engine that does not ask for it by `additional_config`."""

from .activation import register

__all__ = ["register"]
