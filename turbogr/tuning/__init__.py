"""A search for better settings of a recipe on one log, within a given time: `turbogr tune`."""
