"""How updates become one. An aggregator *folds* a stream in O(1) memory, or *collects* all updates first."""
