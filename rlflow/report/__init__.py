"""SHOWING it: graphs and plans as text and pictures, runs as reports."""
