"""The report of runs that go on, kept current in a browser: what is shown, to whom, and how."""
