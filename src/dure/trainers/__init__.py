"""Trainers of transformers, TRL and Lightning, as clients of a federation and as tasks."""
