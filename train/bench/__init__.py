"""Measurements that answer a person's question about a configuration and a machine."""
