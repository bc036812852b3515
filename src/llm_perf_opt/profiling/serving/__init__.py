"""Serving: start a server or attach to one, put loads on it, sample and profile it."""
