"""With this file here `on_ranks` can be imported by the tests in the folders below."""
