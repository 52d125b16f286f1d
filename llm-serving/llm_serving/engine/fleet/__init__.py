"""Code that concerns several replicas: routing, migration, accounting of tenants and classes, reload."""
