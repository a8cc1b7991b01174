"""Migrations, one per file; a file that was released is never edited."""
