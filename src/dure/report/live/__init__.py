"""The live report of runs in progress, kept current in a browser, behind a token."""
