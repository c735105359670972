"""What may be larger than memory: tensors in files, what is offloaded, what is computed again."""
