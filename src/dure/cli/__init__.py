"""The command line: parsing of commands, and output on the terminal."""
