"""Episodes of many turns: agents, tools, environments, and an endpoint for other people's agents."""
