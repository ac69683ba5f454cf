"""What a step does to tensors: buckets and shards, gradients, copies of weights, memory between steps, ranks."""
