"""For people who come from other systems: their command lines (`translation`) and their imports (`verl`)."""
