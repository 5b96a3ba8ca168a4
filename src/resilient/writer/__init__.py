"""The writer process: it makes staged bytes durable and never imports torch."""
