"""Fixtures of the tests on nodes."""

from nodes import model, stock, whole, without

__all__ = ["model", "stock", "whole", "without"]
