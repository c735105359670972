"""What a step needs only now and then lies in files, or in the CPU's memory beside a GPU."""
