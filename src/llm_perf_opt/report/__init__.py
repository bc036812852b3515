"""Reports of an analysis: HTML, Markdown, terminal, charts."""
