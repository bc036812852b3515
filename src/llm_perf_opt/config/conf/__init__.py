"""The configuration groups, as YAML."""
