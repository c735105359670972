"""World of ranks as processes of this machine."""
