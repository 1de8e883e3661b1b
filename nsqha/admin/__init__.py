"""Administration over gRPC (`proto/nsqha/v1/admin.proto`): the broker's own API with plans before acts."""
