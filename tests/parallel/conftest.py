"""With this file here `loops` can be imported by the tests in the folders below."""
