"""Code that spans the replicas of a server: routing, migration, accounting of tenants and classes, reload."""
