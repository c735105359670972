"""What bounds what an output tells of those whose data made it: noise, and the account of it."""
