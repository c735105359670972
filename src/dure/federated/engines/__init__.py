"""Local training of many clients, as fast as the machine allows.

What it computes is what `loop` computes.
"""
