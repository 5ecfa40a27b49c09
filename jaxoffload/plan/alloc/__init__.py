"""Where every tensor is, and when: a TaskGraph and a budget in, a MemGraph out (BUILDMEMGRAPH)."""

from jaxoffload.plan.alloc.placement import place_intervals as place_intervals
