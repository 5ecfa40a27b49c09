"""Where every tensor is, and when: BUILDMEMGRAPH."""

from jaxoffload.plan.alloc.placement import place_intervals as place_intervals
