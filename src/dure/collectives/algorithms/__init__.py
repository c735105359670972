"""All-reduce algorithms, each in its own file."""
