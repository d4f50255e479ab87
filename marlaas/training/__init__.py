"""Policy training: many tenants' batches in shared passes, each with its own optimizer."""
