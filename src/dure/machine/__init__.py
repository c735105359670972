"""This computer: its threads, cores, memory, devices and compiler."""
