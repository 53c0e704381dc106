"""New weights into a running engine, and the canary that checks them."""
