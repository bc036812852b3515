"""The measured process: runtimes and how they are measured."""
