"""Analyses of finished runs: read arrays and files, know no trainer."""
