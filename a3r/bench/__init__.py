"""Benchmarks of training across git commits: which commit made it slower, hungrier or worse.

`suites` says what is measured, `commits` of which commits, `worktrees` and `environments` give each commit its own
code, `measure` runs one sample under a supervisor, `store` keeps the results, `verdicts` and `bisect` decide,
`session` puts them in order, `nightly` does it every night, `compare` and `report` show it.
"""
