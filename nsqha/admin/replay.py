"""Seek, undo and peek."""

from __future__ import annotations
