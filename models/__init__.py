"""How vLLM counts: a tree's own source on terms, the intended model beside it, and the prover."""
