"""Rewrites of the captured program that save work or memory: see docs/rewrites.md."""
