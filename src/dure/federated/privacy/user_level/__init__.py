"""User-level differential privacy: a bound on the model's information about any client."""
