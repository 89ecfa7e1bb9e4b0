"""Why each layer's output and each gradient is laid out as it is."""
