"""The fast reader of torch traces: reads the line layout that torch.profiler writes, byte by byte, without decoding JSON."""
