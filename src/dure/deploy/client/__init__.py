"""Client of a federation over a network: connection, stored state, site policy, and audit log."""
