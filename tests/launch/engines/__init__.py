"""Tests of the submitters."""
