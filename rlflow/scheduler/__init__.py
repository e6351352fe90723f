"""WHEN and WHERE: passes that compile a graph and a placement into a plan, and their verifier."""
