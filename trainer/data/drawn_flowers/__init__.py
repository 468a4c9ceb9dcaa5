"""The embedded flowers: drawn once into the user's cache."""
