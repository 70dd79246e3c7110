"""Ray: the gang of actors, one a rank. The only place that starts them."""
