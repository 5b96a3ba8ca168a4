"""What a user proves a store, or a job, with: conformance, faults, a simulated cluster."""
