"""The verbs, one file each: parse, call one module, print."""
