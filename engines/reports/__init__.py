"""Tables, pictures and pages that show runs, profiles and simulations to people."""
