"""Communicators: implementations that name the class through which ranks exchange tensors."""

from __future__ import annotations

from .attention import ATTENTION

COMMUNICATOR = "communicator"
"""The op under which communicators are registered, resolved and planned."""

NAMED_CLASSES = (ATTENTION, COMMUNICATOR)
"""The ops whose implementations name a class, and which have no contract."""
