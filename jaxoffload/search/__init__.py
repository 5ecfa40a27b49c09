"""Stage 5: of the ways to cut, order and place a function, the one that ends first: simulated."""
