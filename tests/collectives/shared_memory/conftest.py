"""With this file here `thread_ranks` can be imported by the tests in the folders below."""
