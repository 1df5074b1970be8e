"""What a population says about the posterior: figures on collections."""
