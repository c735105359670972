"""Local training of many clients, as fast as the machine allows; what it computes is what `loop`
computes."""
