"""What `resilient.testing.cluster` is made of: virtual time, a store that fails, ranks, and a witness of it all."""
