"""Structure: module trees, weight provenance, the component mapping, CPU and device class branches."""
