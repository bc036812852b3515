"""Pages made of an analysis: HTML, Markdown, terminal, charts."""
