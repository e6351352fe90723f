"""Stages by themselves: parts of a graph, recorded edges, an update again, two runs compared."""
