"""One module per goal of a user: analyze a run, a trace or a program; compare, advise, sweep, cost, list, query."""
