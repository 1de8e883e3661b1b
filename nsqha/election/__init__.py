"""The small truth: which topics exist, who leads each partition, and where that is kept."""
