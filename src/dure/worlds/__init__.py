"""Who takes part, and how they reach each other. Worlds know no system; systems know no world."""
