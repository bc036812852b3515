"""One module per goal of a user: run, analyze, compare, advise, sweep, cost, list."""
