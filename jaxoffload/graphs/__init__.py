"""The two data structures and their laws: every stage imports these, none another's insides."""
