"""A head and a tail that were written apart, in files of their own, and run without the other."""
