"""Tables, pictures and pages of runs, profiles and simulations, for people."""
