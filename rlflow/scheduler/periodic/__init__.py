"""Periodic scheduling in the abstract: tasks, edges with distances, exclusive resources."""
