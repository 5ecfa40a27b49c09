"""The two data structures, their laws, and nothing else: every stage imports these, none imports another's insides."""
