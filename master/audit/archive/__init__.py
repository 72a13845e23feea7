"""Keep history as Parquet, in commits that are whole or absent."""

from __future__ import annotations
