"""Files that run inside a sandbox, or enter one: standard library and the harness's own packages only."""
