"""Turns a plan into processes, and watches them to their end."""
