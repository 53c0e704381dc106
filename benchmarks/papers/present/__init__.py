"""Tables and figures of the papers' simulations."""
