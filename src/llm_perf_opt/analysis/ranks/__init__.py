"""Traces of several ranks of one job."""
