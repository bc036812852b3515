"""The rules, one file per family: each is a small pure function of the evidence that finds something, or nothing."""
