"""Typed configuration, its composition by Hydra, packaged YAML, the registry of runtimes."""
