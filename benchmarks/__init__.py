"""Measurements of single parts against a plain version of themselves or against another program. See README.md."""
