def measure(*a): return {}
