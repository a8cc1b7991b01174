"""Plug points of other frameworks, filled with Holdfast's own writer and reader."""
