"""FLOPs and bytes of any model, counted from the operators that it dispatches."""
