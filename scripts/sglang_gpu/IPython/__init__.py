"""Stands in for IPython: SGLang imports how it shows pages in notebooks."""
