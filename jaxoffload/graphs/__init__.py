"""Data structures, their laws, and lanes: every stage imports these, none another's insides."""
