"""The outside tools: finding them, building their commands, starting processes."""
