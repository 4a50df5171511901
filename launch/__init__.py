"""The tandem command, topologies, the local supervisor, embedded NATS and etcd."""
