"""Which kernels compute what of a model: rules that engines and plans share."""
