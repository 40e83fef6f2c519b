"""``vericache plan``: what drafting is worth on a machine, before anything is started."""
