"""All randomness is a function of the seed and of what it is for."""
